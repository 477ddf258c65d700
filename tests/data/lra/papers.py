"""Made-up papers in the format of the Python package aclsum."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np


def make_papers(n: int) -> dict[str, dict[str, Any]]:
    """Papers by name; each cites 3 of 30 works, and a longer text names the first in 20."""
    generator = np.random.default_rng(0)
    papers = {}
    for i in range(n):
        works = generator.choice(30, 3, replace=False).tolist()
        papers[f"P{i:02}-1001"] = paper(
            [f"Work number {work}: a study" for work in works],
            title=f"Paper {i}",
            body=[f"It follows Author{chr(65 + work)} et al., {1990 + work}." for work in works],
        )
    return papers


def paper(
    works: list[str], title: str = "A title", body: list[str] | None = None
) -> dict[str, Any]:
    """One paper that cites works with these titles."""
    return {
        "title": title,
        "abstract": "An abstract.",
        "pdf_parse": {
            "body_text": [{"text": text, "cite_spans": []} for text in body or ["A body."]],
            "back_matter": [{"text": "Thanks."}],
            "bib_entries": {f"BIBREF{i}": {"title": work} for i, work in enumerate(works)},
        },
    }


def make_wheel(path: Path, papers: dict[str, dict[str, Any]]) -> Path:
    """Write papers to a wheel, with the package's other files."""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("aclsum/__init__.py", "")
        wheel.writestr("aclsum/dataset/train.jsonl", "{}\n")
        for name, content in papers.items():
            wheel.writestr(f"aclsum/dataset/paper_jsons/{name}.json", json.dumps(content))
    return path

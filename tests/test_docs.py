"""Links in the documents resolve, and numbers that follow from the code are current."""

import ast
import math
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.patterns import butterfly

ROOT = Path(__file__).resolve().parent.parent
README, KERNELS = ROOT / "README.md", ROOT / "docs" / "kernels.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [README, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *PAGES]
MEASURED = [README, *(ROOT / "docs" / f"{name}.md" for name in ("evaluation", "lra", "speed"))]

LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s]+)\)")


def relative_links(document: Path) -> list[tuple[str, Path]]:
    """(text, target) of each link and picture that points into this checkout."""
    links = LINK.findall(document.read_text())
    return [
        (text, document.parent / target.partition("#")[0])
        for text, target in links
        if not re.match(r"https?:|mailto:|#|\.\./\.\./actions/", target)  # GitHub's own pages
    ]


def definitions(file: Path) -> set[str]:
    """The functions and classes of a module, and the methods of its classes as Class.method."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(document):
    links = relative_links(document)
    assert links
    assert [target for _, target in links if not target.exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_functions_are_defined_where_the_link_says(document):
    named = [
        (text.strip("`"), target)
        for text, target in relative_links(document)
        if text.startswith("`") and target.suffix == ".py"
    ]
    assert document != KERNELS or len(named) > 40
    assert [(name, target) for name, target in named if name not in definitions(target)] == []


def test_the_readme_is_short():
    text = README.read_text()
    assert len(text.splitlines()) <= 130 and len(text.encode()) <= 9000


def measured_part(document: Path) -> str:
    """The part of a page that reports our measurements."""
    text = document.read_text()  # evaluation.md ends with methods and papers' numbers
    return text.partition("## Your own runs")[0] if document.name == "evaluation.md" else text


def prose(text: str) -> str:
    """Text without code, tables, link targets, and numbers that were not measured."""
    code, target = r"```.*?```|^    .*?$|`.*?`", r"\]\(.*?\)"
    table = r"<!-- table: .*?<!-- end -->|^\|.*?$"  # generated ones may be lists
    others = r"(arXiv|Python|transformers)\s[\d.]+"
    return re.sub(f"{code}|{table}|{target}|{others}", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", MEASURED, ids=lambda path: path.name)
def test_measured_numbers_in_prose_are_in_a_table_of_the_page(document):
    text = measured_part(document)
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    measured = [float(number) for number in re.findall(r"\d+\.\d+", tables)]
    unknown = []
    for number in re.findall(r"\d+\.\d+", prose(text)):
        off = 0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9
        if not any(abs(float(number) - other) <= off for other in measured):
            unknown.append(number)
    assert not unknown


@pytest.mark.parametrize("document", MEASURED, ids=lambda path: path.name)
def test_a_paragraph_has_three_measured_numbers_at_most(document):
    paragraphs = re.split(r"\n\n|\n- ", prose(measured_part(document)))
    without_intervals = [re.sub(r"\([-\d.]+\s+to\s+[-\d.]+\)", "", p) for p in paragraphs]
    crowded = [p for p in without_intervals if len(re.findall(r"\d+\.\d+", p)) > 3]
    assert not crowded


def test_versions_agree():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changes = re.search(r"^## (\S+), (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert changes and changes[1] == version == citation["version"]
    assert changes[2] == str(citation["date-released"])


def test_densities_match_the_code():
    rows = re.findall(r"^\| ([\d,]+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$",
                      KERNELS.read_text(), re.MULTILINE)  # fmt: skip
    assert len(rows) == 4
    for tokens, n_blocks, a_row, density, causal_density in rows:
        n, T = int(n_blocks), int(tokens.replace(",", ""))
        b = T // n
        mask = BlockSparseMask(butterfly(n), b)
        counted = [mask.density(T, T), mask.density(T, T, causal=True)]
        assert [f"{x:.4f}" for x in counted] == [density, causal_density]
        L = int(math.log2(n))
        assert int(a_row) == 1 + L
        assert counted == pytest.approx([(1 + L) / n, (1 + b * (1 + L)) / (1 + b * n)])


def test_butterfly_drawing_matches_the_layout():
    rows = re.findall(r"^ +([01]{3}) +((?:[#.] ){7}[#.]) +((?:[#.] ){7}[#.]) +(\d)$",
                      KERNELS.read_text(), re.MULTILINE)  # fmt: skip
    assert [int(i, 2) for i, *_ in rows] == list(range(8))
    for column, layout in ((1, butterfly(8)), (2, butterfly(8).tril())):
        assert [[mark == "#" for mark in row[column].split()] for row in rows] == layout.tolist()
    assert [int(row[3]) for row in rows] == butterfly(8).tril().sum(1).tolist()

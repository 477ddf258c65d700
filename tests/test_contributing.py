"""Pages for contributors name existing files and commands; GitHub can read the issue forms."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md"]
FORMS = [ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml" for name in ("bug", "feature")]
FOLDERS = [ROOT, *{path.parent for path in (ROOT / "kernels").rglob("*.py")}]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_named_files_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    paths = re.findall(r"`((?:\w+/)*\w+\.(?:py|md)|(?:\w+/)+)`", text)
    missing = [x for x in paths if not any((folder / x).exists() for folder in FOLDERS)]
    assert len(paths) > 5 and not missing
    commands = re.findall(r"python -m ((?:scripts|experiments)\.\w+)", text)
    assert commands and all(map(importlib.util.find_spec, commands))


def test_agents_page_is_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 40


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_forms_have_what_github_requires(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert content["name"] and content["description"]
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids)) and any(field.get("validations") for field in fields)
    assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in fields)


def test_bug_reports_have_the_environment() -> None:
    assert "`python -m scripts.report_environment`" in FORMS[0].read_text()

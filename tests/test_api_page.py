"""docs/api.md matches the docstrings and covers every name that papilio.kernels exports."""

import importlib
import inspect
import re

import kernels
import papilio
from scripts.write_api_page import NAMES, PAGE, render_page

IMPORT = re.compile(r"^from (papilio\S*) import (\w+)$", re.MULTILINE)


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render_page(), "run python -m scripts.write_api_page"


def test_every_public_name_is_on_the_page() -> None:
    names = {name for names in NAMES.values() for name in names.split()}
    assert {*kernels.__all__, *papilio.__all__} <= names | {"patterns"}
    functions = [f.__name__ for f in vars(kernels.patterns).values() if inspect.isfunction(f)]
    defined = {f for f in functions if not f.startswith(("_", "check_"))}
    assert defined <= names


def test_imports_of_the_page_work() -> None:
    imports = IMPORT.findall(PAGE.read_text())
    assert len(imports) == sum("." not in n for names in NAMES.values() for n in names.split())
    for module, name in imports:
        assert getattr(importlib.import_module(module), name).__doc__


def test_links_within_the_page_lead_to_headings() -> None:
    text = PAGE.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {heading.lower().replace(".", "") for heading in headings}
    links = re.findall(r"\]\(#([^)]+)\)", text)
    assert len(links) > 20 and set(links) <= anchors


def test_sections_of_docstrings_become_lists() -> None:
    text = PAGE.read_text()
    assert "\n- `k`, `v`: (B, T_k, H_kv, D), " in text
    assert not re.search(r"^(Args|Attributes|Returns|Raises):$", text, re.MULTILINE)

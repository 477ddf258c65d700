import re
from pathlib import Path

import pytest

from scripts import readme_tables


def test_readme_holds_what_was_measured():
    text = readme_tables.README.read_text()
    assert readme_tables.fill(text) == text
    assert set(re.findall(r"<!-- table: (\w+) -->", text)) == set(readme_tables.TABLES)


def test_pictures_and_files_that_the_readme_names_exist():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", readme_tables.README.read_text())
    assert links
    assert [link for link in links if not Path(link).exists()] == []


def test_tables_are_replaced_whole(monkeypatch):
    monkeypatch.setattr(readme_tables, "TABLES", {"a": lambda: "| new |\n"})
    text = "before\n<!-- table: a -->\n| old |\n| older |\n<!-- end -->\nafter\n"
    assert readme_tables.fill(text) == text.replace("| old |\n| older |", "| new |")
    with pytest.raises(KeyError, match="b"):
        readme_tables.fill(text.replace("table: a", "table: b"))

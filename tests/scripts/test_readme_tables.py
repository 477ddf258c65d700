import re

import pytest

from scripts import readme_tables


def test_pages_hold_what_was_measured():
    texts = [page.read_text() for page in readme_tables.PAGES]
    assert list(map(readme_tables.fill, texts)) == texts
    held = [name for text in texts for name in re.findall(r"<!-- table: (\w+) -->", text)]
    assert sorted(held) == sorted(readme_tables.TABLES)


def test_tables_are_replaced_whole(monkeypatch):
    monkeypatch.setattr(readme_tables, "TABLES", {"a": lambda: "| new |\n"})
    text = "before\n<!-- table: a -->\n| old |\n| older |\n<!-- end -->\nafter\n"
    assert readme_tables.fill(text) == text.replace("| old |\n| older |", "| new |")
    with pytest.raises(KeyError, match="b"):
        readme_tables.fill(text.replace("table: a", "table: b"))

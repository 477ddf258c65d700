import re

import pytest

from experiments import pages


def test_pages_hold_what_was_measured():
    texts = [page.read_text() for page in pages.PAGES]
    assert list(map(pages.fill, texts)) == texts
    held = [name for text in texts for name in re.findall(r"<!-- table: (\w+) -->", text)]
    assert sorted(held) == sorted(pages.TABLES)


def test_tables_are_replaced_whole(monkeypatch):
    monkeypatch.setattr(pages, "TABLES", {"a": lambda: "| new |\n"})
    text = "before\n<!-- table: a -->\n| old |\n| older |\n<!-- end -->\nafter\n"
    assert pages.fill(text) == text.replace("| old |\n| older |", "| new |")
    with pytest.raises(KeyError, match="b"):
        pages.fill(text.replace("table: a", "table: b"))


def test_pictures_are_drawn_next_to_their_results(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "PAGES", ())
    assert all(path.exists() and path.parent == pages.RESULTS for path in pages.PICTURES)
    moved = {tmp_path / path.name: draw for path, draw in pages.PICTURES.items()}
    monkeypatch.setattr(pages, "PICTURES", moved)
    pages.main()
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in moved)

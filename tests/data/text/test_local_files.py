"""Folders, globs, links, and what is left out of them."""

import gzip
import os

import pytest

from data.text.documents import FileSource
from data.text.local_files import LocalFiles


@pytest.fixture
def tree(tmp_path):
    """Makes files with a little text in a folder; returns that folder."""

    def make(*names):
        for name in names:
            path = tmp_path / "texts" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"text of {name}")
        return tmp_path / "texts"

    return make


def found(*names, as_text=False):
    files = LocalFiles(as_text)
    return files.find([str(name) for name in names]), dict(files.left_out)


def test_linked_folders_are_read_as_by_a_glob(tree, tmp_path):
    root = tree("a.txt", "z/c.txt")
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "b.txt").write_text("b")
    (root / "more").symlink_to(tmp_path / "real")
    (root / "d.txt").symlink_to(tmp_path / "real" / "d.text")
    (tmp_path / "real" / "d.text").write_text("d")
    expected = [root / name for name in ("a.txt", "d.txt", "more/b.txt", "z/c.txt")]
    assert found(root)[0] == found(root / "**/*.txt")[0] == expected


def test_links_in_a_circle_end(tree):
    root = tree("a.txt", "b/c.txt")
    for name in ("one", "two", "b/three", "b/four"):
        (root / name).symlink_to(root)
    assert found(root) == ([root / "a.txt", root / "b/c.txt"], {})
    assert found(root / "**/*.txt") == ([root / "a.txt", root / "b/c.txt"], {})


def test_a_file_of_two_names_is_read_once(tree):
    root = tree("v1/a.txt", "v1/b.txt")
    (root / "latest").symlink_to(root / "v1")
    (root / "z.txt").symlink_to(root / "v1" / "a.txt")
    files, left_out = found(root)
    assert files == [root / "latest/a.txt", root / "latest/b.txt"]
    assert left_out == {"other names of files that are read": 3}
    # but what is named twice may be in train and val
    for twice in ([root, root / "z.txt"], [root / "v1/*.txt", root / "latest"]):
        with pytest.raises(ValueError, match="is given twice"):
            found(*twice)
    with pytest.raises(ValueError, match="is given twice"):
        FileSource([str(root / "v1")], val=[str(root / "latest" / "a.txt")])


def test_documents_left_out_of_a_folder_are_counted(tree):
    root = tree("a.txt", "b.md", "c.MD", "d.csv.gz", "Makefile", ".git/x.txt", ".e.txt", "s/f.png")
    (root / "empty.txt").touch()
    (root / "nowhere.txt").symlink_to(root / "absent")
    os.mkfifo(root / "pipe.txt")
    assert found(root) == (
        [root / "a.txt"],
        {
            ".md": 2,
            ".csv.gz": 1,
            ".png": 1,
            "without a suffix": 1,
            "hidden folders": 1,
            "hidden files": 1,
            "empty files": 1,
            "broken links": 1,
            "not regular files": 1,
        },
    )


def test_the_summary_names_the_most_frequent(tree):
    root = tree("a.txt", "1.md", "2.md", *(f"{n}.x{n}" for n in range(12)))
    files = LocalFiles()
    files.find([str(root)])
    assert files.summary().startswith("2 .md, 1 .x0, ")
    assert files.summary().endswith(", 5 others")
    described = FileSource([str(root)], val=[str(tree("../val/b.txt") / "../val")]).describe()
    assert described["left_out_files"] == files.summary()
    assert LocalFiles().summary() is None


def test_other_files_as_text(tree):
    root = tree("a.txt", "b.md", "Makefile", "c.py", "d.csv.gz")
    (root / "d.csv.gz").unlink()
    (root / "e.png").write_bytes(b"\x89PNG\0")
    (root / "__init__.py").touch()
    files, left_out = found(root, as_text=True)
    assert files == [root / name for name in ("Makefile", "a.txt", "b.md", "c.py")]
    assert left_out == {".png (not UTF-8)": 1, "empty files": 1}
    texts = [d.text for d in FileSource([str(root)], val_ratio=0.5, as_text=True).documents()]
    assert texts == [f"text of {path.name}" for path in files]
    assert found(root / "b.md", as_text=True)[0] == [root / "b.md"]


def test_a_damaged_file_that_may_be_text_is_left_out(tree):
    root = tree("a.txt")
    (root / "b.gz").write_bytes(gzip.compress(b"text" * 1000)[:-9])
    (root / "c.csv.xz").write_bytes(b"no xz")
    (root / "d.zst").write_bytes(b"no zst")
    left_out = {".gz (damaged)": 1, ".csv.xz (damaged)": 1, ".zst (damaged)": 1}
    assert found(root, as_text=True) == ([root / "a.txt"], left_out)
    with pytest.raises(ValueError, match=r"b\.gz cannot be read to its end"):
        found(root / "b.gz", as_text=True)


def test_a_named_file_is_not_left_out(tree):
    root = tree("a.md", ".b.txt")
    (root / "c.png").write_bytes(b"\x89PNG\0")
    assert found(root / ".b.txt")[0] == [root / ".b.txt"]
    with pytest.raises(FileNotFoundError, match=r"a\.md must have a known format.* --as-text"):
        found(root / "a.md")
    with pytest.raises(ValueError, match=r"c\.png is not UTF-8 text"):
        found(root / "c.png", as_text=True)
    with pytest.raises(FileNotFoundError, match=r"left out: 1 \.md.* --as-text reads"):
        found(root / "*.md")


def test_globs(tree, monkeypatch):
    root = tree("a.txt", "b/c.txt", "b/d/e.txt", "b/.h/f.txt", "g.jsonl")
    monkeypatch.chdir(root)
    names = {
        "*": (["a.txt", "g.jsonl"], {"folders": 1}),
        "*/*.txt": (["b/c.txt"], {}),
        "**/*.txt": (["a.txt", "b/c.txt", "b/d/e.txt"], {}),
        "b/**": (["b/c.txt", "b/d/e.txt"], {}),
        "**/d/*": (["b/d/e.txt"], {}),
        "b/.h/*.txt": (["b/.h/f.txt"], {}),
    }
    for pattern, (expected, left_out) in names.items():
        files, others = found(pattern)
        assert ([str(path) for path in files], others) == (expected, left_out), pattern

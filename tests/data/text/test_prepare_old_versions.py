"""Folders that version 0.2 prepared, finished or not."""

import json

import pytest

from data.files import load_sealed
from data.text.documents import FileSource
from data.text.prepare import prepare


@pytest.fixture
def by_old_version(texts, tokenizer_file, tmp_path):
    """Makes what version 0.2 left of a folder of files, finished or not."""
    folder, out = tmp_path / "folder", tmp_path / "out"
    folder.mkdir()
    for number, text in enumerate(texts(20)):
        (folder / f"{number}.txt").write_text(text)

    def run():
        source = FileSource([str(folder)], val_ratio=0.2)
        return prepare(source, out, tokenizer=str(tokenizer_file), shard_tokens=50)

    def make(name, **changes):
        values = load_sealed(out / name)
        for new in ("as_text", "skip_bad", "left_out_files"):
            del values["settings"]["source"][new]
        values["settings"]["source"] |= changes
        values.pop("text_rules", None)
        (out / name).write_text(json.dumps(values))

    return run, make


def test_a_folder_that_an_old_version_finished_is_accepted(by_old_version):
    run, make = by_old_version
    run()
    make("manifest.json")
    assert run().new_text_bytes == 0


def test_a_folder_in_which_an_old_version_found_other_files(by_old_version):
    run, make = by_old_version
    run()
    make("manifest.json", files=21, listing_sha256="0" * 64)
    with pytest.raises(ValueError, match=r"source\.files is 21 .*also read empty and hidden files"):
        run()


def test_work_that_an_old_version_began_is_refused(by_old_version, monkeypatch):
    run, make = by_old_version
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("data.text.prepare._finish", lambda *_: 1 / 0)
        run()
    make("progress.json")
    with pytest.raises(ValueError, match=r"begun by another version.*delete it, or choose another"):
        run()

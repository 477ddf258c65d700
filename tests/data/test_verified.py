"""Files are checked once, and again when they are others."""

import os

import pytest

from data.verified import VERIFIED, BackgroundTask, Verified


def test_once_until_the_file_or_its_sum_changes(tmp_path):
    path, checked = tmp_path / "a", []
    path.write_text("one")

    def look(sha256="x"):
        Verified(tmp_path).check_once([path], sha256, lambda: checked.append(path.read_text()))
        return len(checked)

    assert [look(), look(), look("y"), look("y")] == [1, 1, 2, 2]
    path.write_text("three")
    assert look("y") == 3
    os.utime(path, ns=(1, 1))
    assert [look("y"), look("y")] == [4, 4]
    for content in ("{", "3", '{"a": 3}', '{"private": "b", "a": ["c", [1, "d"]]}'):
        (tmp_path / VERIFIED).write_text(content)
        before = len(checked)
        assert look("y") == before + 1
        assert "private" not in (tmp_path / VERIFIED).read_text()
    (tmp_path / VERIFIED).unlink()
    os.mkfifo(tmp_path / VERIFIED)  # which is not waited for
    assert look("y") == before + 2


def test_failures_are_not_remembered(tmp_path):
    path = tmp_path / "a"
    path.touch()

    def fail():
        raise ValueError("damaged")

    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            Verified(tmp_path).check_once([path], "x", fail)


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    path, checked = tmp_path / "a", []
    path.touch()

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr("data.verified.write_atomically", refuse)
    for _ in range(2):
        Verified(tmp_path).check_once([path], "x", lambda: checked.append(1))
    assert len(checked) == 2


@pytest.mark.parametrize("error", [ValueError, MemoryError])
def test_an_error_in_the_background_is_raised_where_somebody_looks(error):
    def fail():
        raise error("damaged")

    failing = BackgroundTask(fail)
    for look in (failing.wait, failing.raise_if_failed):
        with pytest.raises(error, match="damaged"):
            look()
    BackgroundTask(lambda: None).wait()

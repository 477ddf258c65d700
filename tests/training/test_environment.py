import subprocess

import pytest

from training import environment
from training.environment import commit, machine, read_environment, write_environment


def test_a_run_keeps_its_environment(tmp_path):
    assert read_environment(tmp_path) is None
    write_environment(tmp_path)
    assert read_environment(tmp_path) == machine()


def test_commit_of_a_copy(monkeypatch):
    monkeypatch.setenv("PAPILIO_COMMIT", "abc1234")
    assert commit() == "abc1234"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder that takes the place of this checkout."""
    monkeypatch.delenv("PAPILIO_COMMIT", raising=False)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    return tmp_path


def test_commit_of_a_checkout(checkout):
    def git(*arguments):
        command = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)

    assert commit() is None  # no checkout
    git("init")
    (checkout / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    clean = git("rev-parse", "--short", "HEAD").stdout.strip()
    assert commit() == clean
    (checkout / "file").write_text("2")
    assert commit() == clean + "+"


def test_no_git(checkout, monkeypatch):
    (checkout / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert commit() is None

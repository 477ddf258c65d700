"""Files are written whole or not at all."""

import errno
import fcntl
import hashlib
import os
import subprocess
import sys

import pytest

from data.files import (
    LARGEST,
    is_present,
    list_folder,
    lock_folder,
    parse_json,
    read_text,
    sha256_of,
    write_atomically,
)

WRITER = """
import sys
from pathlib import Path
from data.files import write_atomically
path = Path(sys.argv[1])
for number in range(100):
    write_atomically(path, sys.argv[2].encode() * 5000)
    assert len(set(path.read_bytes())) == 1 and path.stat().st_size == 5000
"""

HOLDER = """
import sys, time
from pathlib import Path
from data.files import lock_folder
with lock_folder(Path(sys.argv[1]), "taken"):
    print("held", flush=True)
    time.sleep(20)
"""


def test_a_full_disk_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_processes_may_write_the_same_file(tmp_path):
    path = tmp_path / "file"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, letter]) for letter in "ab"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    assert list(tmp_path.iterdir()) == [path]


def test_one_at_a_time_holds_the_lock_of_a_folder(tmp_path):
    with lock_folder(tmp_path, "first"):
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ValueError, match="^wait for it$"), lock_folder(tmp_path, "wait for it"):
            pass
        # who was refused did not free it
        with pytest.raises(ValueError, match="again"), lock_folder(tmp_path, "again"):
            pass
    with lock_folder(tmp_path, "free"):
        pass


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK])
def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, "as on NFS")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.warns(UserWarning, match=r"cannot lock it \(as on NFS\): make sure") as warned,
        lock_folder(tmp_path, "taken"),
        lock_folder(tmp_path, "taken"),
    ):
        pass
    assert len(warned) == 2


def test_another_failure_of_the_lock_is_not_passed_over(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EINTR, "interrupted")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="interrupted"), lock_folder(tmp_path, "taken"):
        pass


def test_a_killed_process_holds_no_lock(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="taken"), lock_folder(tmp_path, "taken"):
            pass
        holder.kill()
    with lock_folder(tmp_path, "free"):
        pass


def test_a_folder_that_does_not_exist_has_no_contents(tmp_path):
    (tmp_path / "file").touch()
    assert list_folder(tmp_path / "missing") == list_folder(tmp_path / "file" / "in_it") == []
    assert list_folder(tmp_path) == [tmp_path / "file"]


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path, monkeypatch):
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to("/not/mounted")
    with pytest.raises(OSError, match=r"file cannot be listed \(Not a directory\): it must be"):
        list_folder(file)
    for look in (list_folder, is_present):
        with pytest.raises(OSError, match="link links to /not/mounted, which does not exist"):
            look(link)

    def denied(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(os, "listdir", denied)
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(OSError, match=r"cannot be listed \(Permission denied\)"):
        list_folder(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 250])
def test_the_sha256_of_a_file_of_any_size(tmp_path, monkeypatch, size):
    monkeypatch.setattr("data.files._BLOCK", 100)
    (tmp_path / "file").write_bytes(b"a" * size)
    assert sha256_of(tmp_path / "file") == hashlib.sha256(b"a" * size).hexdigest()


@pytest.mark.parametrize("name", [*LARGEST, "anything.json"])
def test_a_file_too_large_for_its_kind_is_not_read(tmp_path, name):
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    largest = LARGEST.get(name, 256 << 20)
    message = f"{name} has {1 << 40} bytes, but at most {largest} are allowed$"
    with pytest.raises(ValueError, match=message):
        read_text(path)


@pytest.mark.parametrize("text", ["[" * 31 + "]" * 31, '{"a": ' * 31 + "1" + "}" * 31])
def test_deeply_nested_values_are_refused(text):
    parse_json(text[len(text.rstrip("]}1")) // 31 : -1])  # one less is taken
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(text)

"""NumPy files of absurd sizes are refused before anything is allocated."""

import io
import resource
import zipfile

import numpy as np
import pytest

from data.arrays import check_npy, load_npz


def npy(shape, descr="<i8", content=b""):
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"
    header = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def npz(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


@pytest.fixture
def little_memory():
    """2 GiB more than now: what would be allocated of that size raises."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


WRONG = {
    "too long": npy("(1,)", content=bytes(9)),
    "too short": npy("(2,)", content=bytes(8)),
    "a terabyte": npy(f"({1 << 40},)"),
    "more than an address": npy(f"({1 << 70}, {1 << 70})"),
    "negative": npy("(-1, -8)"),
    "a boolean": npy("(True,)", content=bytes(8)),
    "objects": npy("(1,)", "|O", bytes(8)),
    "no dtype": npy("(1,)", "s3cr3t", bytes(8)),
    "a dtype of a terabyte": npy("(1,)", f"|V{1 << 40}"),
    "no header": b"s3cr3t",
    "nothing": b"",
    "a nested header": npy("(" * 60 + "1" + ")" * 60, content=bytes(8)),
    "a version of the future": b"\x93NUMPY\x09\x00" + npy("(1,)", content=bytes(8))[8:],
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_a_header_declares_the_contents_of_its_file(tmp_path, little_memory, content):
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="header") as error:
        check_npy(path)
    assert "s3cr3t" not in str(error.value)
    npz(tmp_path / "x.npz", x=content)
    with pytest.raises(ValueError, match="header"):
        load_npz(tmp_path / "x.npz")


def test_files_of_numpy_are_accepted(tmp_path):
    arrays = {"a": np.arange(6).reshape(2, 3), "b": np.array("text"), "c": np.zeros((0, 4))}
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "x.npz", **arrays)
        loaded = load_npz(tmp_path / "x.npz")
        assert loaded.keys() == arrays.keys()
        assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())
    np.save(tmp_path / "x.npy", np.asfortranarray(arrays["a"]))
    check_npy(tmp_path / "x.npy")


def test_an_archive_that_would_unpack_to_more_is_refused(tmp_path, little_memory):
    path = tmp_path / "x.npz"
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(1 << 20))
    npz(path, x=buffer.getvalue())
    content = path.read_bytes()
    size = len(buffer.getvalue()).to_bytes(4, "little")
    assert content.count(size) == 2  # in both headers
    path.write_bytes(content.replace(size, ((1 << 32) - 2).to_bytes(4, "little")))
    with pytest.raises(ValueError, match="declares 8388736 bytes, but it has 4294967294"):
        load_npz(path)
    npz(path, **{f"x{n}": b"" for n in range(10_001)})
    with pytest.raises(ValueError, match="it declares 10001 arrays"):
        load_npz(path)
    path.write_bytes(content[:-9])
    with pytest.raises(ValueError, match="not a complete .npz file"):
        load_npz(path)


def test_damage_to_the_directory_of_an_archive_is_a_value_error(tmp_path):
    """A changed offset may place an array before the file."""
    path = tmp_path / "arrays.npz"
    np.savez(path, a=np.arange(5.0), b=np.arange(3))
    whole = path.read_bytes()
    start = whole.index(b"PK\x01\x02")  # of the directory, at the end of the file
    messages = set()
    for place in range(start, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            load_npz(path)
        except ValueError as error:
            messages.add(str(error))
    assert "it declares an array that begins before the file" in messages

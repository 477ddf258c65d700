"""The header of a safetensors file is that of a file of its size, and the rest is not read."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from data.tensor_files import declared_shapes


def test_shapes_of_what_safetensors_writes(tmp_path):
    tensors = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(0, 4),
        "c": torch.tensor(1, dtype=torch.int8),
    }
    save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    assert declared_shapes(tmp_path / "x") == {"a": (2, 3), "b": (0, 4), "c": ()}


def file_of(header, content=b""):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + content


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "declares a header of 0 bytes"),
        ((1 << 60).to_bytes(8, "little"), "declares a header of 1152921504606846976 bytes"),
        (file_of({"a": ENTRY}, bytes(7)), "declares .* bytes, but it has"),
        (
            file_of({"a": ENTRY | {"data_offsets": [0, 1 << 50]}}, bytes(8)),
            "declares .* bytes, but",
        ),
        (file_of({"a": {}}), "its header is damaged"),
        (file_of({"a": ENTRY | {"data_offsets": []}}), "its header is damaged"),
        (file_of({"a": ENTRY | {"data_offsets": ["0", "8"]}}), "its header is damaged"),
        (file_of([1]), "its header is damaged"),
        (file_of(b"{"), "Expecting property name"),
        (file_of(b"[" * 10_000), "nested too deeply"),
        (file_of(b"\xff"), "can't decode"),
    ],
)
def test_a_false_header_is_refused(tmp_path, content, reason):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        declared_shapes(tmp_path / "x")


def test_a_sparse_file_and_a_pipe_are_not_waited_for(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(file_of({"a": ENTRY}, bytes(8)))
    with path.open("r+b") as file:
        file.truncate(1 << 42)
    with pytest.raises(ValueError, match=f"but it has {1 << 42}"):
        declared_shapes(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="x is not a regular file"):
        declared_shapes(path)

"""Safetensors files that may be somebody else's: what they declare is compared with their size."""

from pathlib import Path

from data.files import check_regular, parse_json

_LARGEST_HEADER = 100_000_000  # bytes, as the safetensors library takes it


def declared_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a safetensors file, of which the header alone is read.

    Raises:
        ValueError: its header is damaged, or the file does not have the bytes that it declares.
        FileNotFoundError: there is nothing.
    """
    check_regular(path)
    size = path.stat().st_size
    with path.open("rb") as file:  # not mapped by the library: it may be larger than all memory
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _LARGEST_HEADER):
            raise ValueError(f"its header declares {length} bytes of itself, and it has {size}")
        header = parse_json(file.read(length))
    try:
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        declared = 8 + length + max(ends, default=0)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError("its header is damaged") from error
    if declared != size:
        raise ValueError(f"its header declares {declared} bytes, and it has {size}")
    return shapes

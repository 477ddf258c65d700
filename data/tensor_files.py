"""Read the headers of untrusted safetensors files, and check the declared against the real size."""

from pathlib import Path

from data.files import check_regular, parse_json

_MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library


def declared_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a safetensors file; reads the header only.

    Raises:
        ValueError: The header is damaged, or the file does not have the declared size.
        FileNotFoundError: The file does not exist.
    """
    check_regular(path)
    size = path.stat().st_size
    with path.open("rb") as file:  # not mapped by the library: it may be larger than all memory
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"it declares a header of {length} bytes, but has {size} in all")
        header = parse_json(file.read(length))
    try:
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        declared = 8 + length + max(ends, default=0)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError("its header is damaged") from error
    if declared != size:
        raise ValueError(f"its header declares {declared} bytes, but it has {size}")
    return shapes

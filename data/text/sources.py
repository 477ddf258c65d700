"""Which source of documents the names on a command line mean."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.text.documents import (
    HUB_VAL_RATIO,
    LOCAL_VAL_RATIO,
    DocumentSource,
    FileSource,
    HubSource,
    StdlibSource,
)
from data.text.readers import is_supported


def open_source(
    names: Sequence[str],
    *,
    val: Sequence[str] = (),
    val_ratio: float | None = None,
    text_field: str = "text",
    txt_separator: str | None = None,
    hub_config: str | None = None,
) -> DocumentSource:
    """Choose the source that the names mean.

    Args:
        names: "stdlib", one dataset name on the Hugging Face hub, or local files, folders, globs.
        val: Local files, folders and globs for validation; without them the source is split.
        val_ratio: Share of the documents for validation; the default is 0.0005 for the hub and
            0.01 for the rest.
        text_field: JSON field or column that holds the text.
        txt_separator: String between the documents of .txt files; without it a file is a document.
        hub_config: Configuration of the hub dataset, where it has several.

    Raises:
        ValueError: An option does not fit the source, or the validation split would be empty.
        FileNotFoundError: A local name matches nothing.
    """
    if val_ratio is not None and not 0 < val_ratio < 1:
        raise ValueError(f"val_ratio={val_ratio} must lie between 0 and 1.")
    if val and val_ratio is not None:
        raise ValueError("val and val_ratio exclude each other: give one of them.")
    local_only = {"val": val, "txt_separator": txt_separator}
    hub_name = len(names) == 1 and not _looks_local(names[0])
    if list(names) == ["stdlib"]:
        other_field = text_field if text_field != "text" else None
        useless = {"hub_config": hub_config, "text_field": other_field}
        _refuse("the standard library", local_only | useless)
        return StdlibSource(val_ratio or LOCAL_VAL_RATIO)
    if hub_name:
        _refuse(f"the hub dataset {names[0]!r}", local_only)
        return HubSource(names[0], hub_config, text_field, val_ratio or HUB_VAL_RATIO)
    _refuse("local files", {"hub_config": hub_config})
    return FileSource(
        names,
        val=val,
        val_ratio=val_ratio or LOCAL_VAL_RATIO,
        text_field=text_field,
        txt_separator=txt_separator,
    )


def _looks_local(name: str) -> bool:
    return (
        any(mark in name for mark in "*?[")
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or is_supported(Path(name))
        or Path(name).exists()
    )


def _refuse(source: str, options: dict[str, Any]) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise ValueError(f"{', '.join(given)} has no meaning for {source}; leave it out.")

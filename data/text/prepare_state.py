"""What an unfinished preparation remembers, so that the next run goes on with the same settings."""

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.files import load_json, lock_folder, to_json, write_atomically
from data.text.documents import SPLITS
from data.text.shards import FORMAT_VERSION, PROGRESS, SplitInfo


@dataclass
class PrepareState:
    """What progress.json records between runs."""

    settings: dict[str, Any]
    """As they go into the manifest."""
    splits: dict[str, SplitInfo]
    """Counts that are safe on disk; tokens beyond the finished shards are in an open one."""
    documents_read: int = 0
    """Documents of the source that the counts cover: the number to go on from."""
    tokenizer_sha256: str | None = None
    """Of the tokenizer.json beside the shards, once it is written."""
    format_version: int = FORMAT_VERSION

    def save(self, out: Path) -> None:
        """Write progress.json atomically; what it counts must be on the disk already."""
        write_atomically(out / PROGRESS, to_json(asdict(self)))

    @staticmethod
    def load(out: Path, settings: dict[str, Any]) -> "PrepareState":
        """Read progress.json, or begin it.

        Raises:
            ValueError: It was begun with other settings.
        """
        if not (out / PROGRESS).exists():
            state = PrepareState(settings, {split: SplitInfo() for split in SPLITS})
            state.save(out)
            return state
        values = load_json(out / PROGRESS)
        try:
            state = PrepareState(**values)
            state.splits = {k: SplitInfo.from_json(v) for k, v in values["splits"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{out / PROGRESS} lacks what it must have ({error}); delete {out} and prepare it "
                "again."
            ) from error
        check_settings(out, state.settings, settings)
        return state


def check_settings(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on in a folder that was begun with other settings, naming the differences."""
    old, new = _flat(before), _flat(now)
    changes = [
        f"{name}: {old.get(name)!r} there, {new.get(name)!r} now"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if changes:
        raise ValueError(
            f"{out} holds work of other settings ({'; '.join(changes)}); repeat those settings, "
            "choose another --out folder, or delete this one."
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def only_run(out: Path) -> AbstractContextManager[None]:
    """Hold the folder's lock, which the system frees when the process ends in any way.

    Raises:
        ValueError: Another process holds it.
    """
    return lock_folder(out, f"{out} is being prepared by another process; wait for it or end it.")

"""Resolve the names on a command line to local files, and report which are left out and why."""

import glob
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from data.files import check_regular
from data.text.readers import COMPRESSIONS, SUPPORTED, file_format, is_text

_MAX_REASONS = 8
_ANY_DEPTH = "**"


@dataclass
class LocalFiles:
    """Files named directly or by folders and globs, without duplicates.

    Links to files and folders are followed. If one folder or glob reaches a file by several names,
    the first one in sorted order is read. Naming a file twice on the command line is an error.
    """

    as_text: bool = False
    """Read files of other formats as plain text."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of files that folders and globs left out, by reason (mostly their suffix)."""
    _resolved: set[Path] = field(default_factory=set)

    def find(self, names: Sequence[str]) -> list[Path]:
        """Find files in the order of `names`; those of a folder or glob in sorted order.

        Raises:
            FileNotFoundError: A name matches no file that can be read.
            ValueError: A file is given twice, or cannot be read.
        """
        return [path for name in names for path in self._files_of(name)]

    def summary(self) -> str | None:
        """Summary of the files that were left out, by reason; None if there are none."""
        named = self.left_out.most_common(_MAX_REASONS)
        parts = [f"{count:,} {reason}" for reason, count in named]
        if others := self.left_out.total() - sum(count for _, count in named):
            parts.append(f"{others:,} others")
        return ", ".join(parts) or None

    def _files_of(self, name: str) -> list[Path]:
        path = Path(name).expanduser()
        if path.is_dir():
            files = self._without_left_out(_walk(path), hidden=False)
        elif path.exists():
            self._check_named(path)
            files = {path.resolve(): path}
        else:
            files = self._without_left_out(_glob(path), hidden=True)
        if not files:
            reason = "holds no file of a known format" if path.exists() else "matches no file"
            left_out = f" (left out: {self.summary()})" if self.left_out else ""
            raise FileNotFoundError(
                f"{name!r} {reason}{left_out}; the formats are {SUPPORTED}{self._hint()}."
            )
        for resolved, file in files.items():
            if resolved in self._resolved:
                raise ValueError(
                    f"{file} is given twice (a file must be in the corpus once, and not in both "
                    "train and val); remove one."
                )
        self._resolved |= files.keys()
        return list(files.values())

    def _check_named(self, path: Path) -> None:
        """Raise an error if a file that was named directly cannot be read."""
        check_regular(path)
        if file_format(path) is not None:
            return
        if not self.as_text:
            raise FileNotFoundError(
                f"{path} must have a known format; the formats are {SUPPORTED}{self._hint()}."
            )
        if not is_text(path):
            raise ValueError(f"{path} is not UTF-8 text, which --as-text needs; remove it.")

    def _hint(self) -> str:
        return "" if self.as_text else ", and --as-text reads any other text file"

    def _without_left_out(self, paths: Iterator[Path], *, hidden: bool) -> dict[Path, Path]:
        """Filter the files that are read, keyed by resolved path, and count the others."""
        files: dict[Path, Path] = {}
        for path in paths:
            reason = "hidden files" if not hidden and _is_hidden(path) and path.is_file() else None
            if reason := reason or self._reason_to_leave_out(path):
                self.left_out[reason] += 1
            elif files.setdefault(path.resolve(), path) is not path:
                self.left_out["other names of files that are read"] += 1
        return files

    def _reason_to_leave_out(self, path: Path) -> str | None:
        if path.is_dir():
            # a glob does not enter its folders; a walk does not enter hidden ones
            return "hidden folders" if _is_hidden(path) else "folders"
        if not path.exists():
            return "broken links"
        if not path.is_file():
            return "not regular files"
        kind = file_format(path)
        if kind in ("text", None) and path.stat().st_size == 0:
            return "empty files"
        if kind is not None:
            return None
        n_suffixes = 2 if path.suffix.lower() in COMPRESSIONS else 1
        suffix = "".join(path.suffixes[-n_suffixes:]).lower() or "without a suffix"
        if not self.as_text:
            return suffix
        try:
            return None if is_text(path) else f"{suffix} (not UTF-8)"
        except ValueError:  # it cannot be decompressed
            return f"{suffix} (damaged)"


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _walk(root: Path) -> Iterator[Path]:
    """Walk the files of a folder and its subfolders, in sorted order.

    Links to folders are followed, except to a folder that contains the link. Hidden subfolders are
    yielded but not entered.
    """
    stack = [(root, frozenset[Path]())]
    while stack:
        path, parents = stack.pop()
        if not path.is_dir() or (parents and _is_hidden(path)):
            yield path
        elif (resolved := path.resolve()) not in parents:
            children = sorted(path.iterdir(), reverse=True)
            stack += [(child, parents | {resolved}) for child in children]


def _glob(pattern: Path) -> Iterator[Path]:
    """Matches of a pattern, in sorted order; with `**`, only files that are not hidden."""
    if _ANY_DEPTH not in pattern.parts:
        yield from map(Path, sorted(glob.glob(str(pattern))))
        return
    # glob.glob does not terminate for circular links
    n_fixed = next(i for i, part in enumerate(pattern.parts) if glob.has_magic(part))
    root, rest = Path(*pattern.parts[:n_fixed]), pattern.parts[n_fixed:]
    for path in _walk(root) if root.is_dir() else ():
        if not _is_hidden(path) and _matches(path.relative_to(root).parts, rest):
            yield path


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path match a pattern, in which `**` is any number of parts."""
    if not pattern:
        return not parts
    if pattern[0] == _ANY_DEPTH:
        return any(_matches(parts[skipped:], pattern[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])

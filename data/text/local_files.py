"""Which local files the names on a command line mean, and which are left out and why."""

import glob
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from data.files import check_regular
from data.text.readers import COMPRESSIONS, SUPPORTED, file_format, is_text

_MOST_NAMED = 8
_ANY_DEPTH = "**"


@dataclass
class LocalFiles:
    """The files of names, folders and globs, each of them once.

    Links to files and folders are followed. A file that one folder or glob reaches by several names
    is read by the first of them in sorted order; named twice on the command line it is an error.
    """

    as_text: bool = False
    """Read files of other formats as plain text."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of files that folders and globs left out, by reason: mostly their suffix."""
    _known: set[Path] = field(default_factory=set)

    def find(self, names: Sequence[str]) -> list[Path]:
        """The files in the order of their names; those of folders and globs in sorted order.

        Raises:
            FileNotFoundError: A name matches no file that can be read.
            ValueError: A file is given twice, or cannot be read.
        """
        return [path for name in names for path in self._files_of(name)]

    def summary(self) -> str | None:
        """Numbers and reasons of the files left out; None if there are none."""
        named = self.left_out.most_common(_MOST_NAMED)
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
            if resolved in self._known:
                raise ValueError(
                    f"{file} is given twice (a file must be in the corpus once, and not in both "
                    "train and val); remove one."
                )
        self._known |= files.keys()
        return list(files.values())

    def _check_named(self, path: Path) -> None:
        """Refuse a file given by its own name that cannot be read."""
        check_regular(path)
        if file_format(path) is not None:
            return
        if not self.as_text:
            raise FileNotFoundError(
                f"{path} is no file of a known format; the formats are {SUPPORTED}{self._hint()}."
            )
        if not is_text(path):
            raise ValueError(f"{path} is not UTF-8 text, which --as-text needs; remove it.")

    def _hint(self) -> str:
        return "" if self.as_text else ", and --as-text reads any other text file"

    def _without_left_out(self, paths: Iterator[Path], *, hidden: bool) -> dict[Path, Path]:
        """The files that are read, by what their names resolve to; counts the others."""
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
            # a glob's folders are no files of it; those that begin with a dot are not entered
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
    """All that a folder and its subfolders hold, but for these, in sorted order.

    Links to folders are followed, but not to one that they are in. Of a hidden subfolder only the
    subfolder itself is given.
    """
    waiting = [(root, frozenset[Path]())]
    while waiting:
        path, parents = waiting.pop()
        if not path.is_dir() or (parents and _is_hidden(path)):
            yield path
        elif (resolved := path.resolve()) not in parents:
            children = sorted(path.iterdir(), reverse=True)
            waiting += [(child, parents | {resolved}) for child in children]


def _glob(pattern: Path) -> Iterator[Path]:
    """Matches of a pattern, in sorted order; with `**` files alone, none of them hidden."""
    if _ANY_DEPTH not in pattern.parts:
        yield from map(Path, sorted(glob.glob(str(pattern))))
        return
    # not by glob.glob, which runs in circles where links do
    n_fixed = next(i for i, part in enumerate(pattern.parts) if glob.has_magic(part))
    root, rest = Path(*pattern.parts[:n_fixed]), pattern.parts[n_fixed:]
    for path in _walk(root) if root.is_dir() else ():
        if not _is_hidden(path) and _fits(path.relative_to(root).parts, rest):
            yield path


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path fit those of a pattern, in which `**` is any number of them."""
    if not pattern:
        return not parts
    if pattern[0] == _ANY_DEPTH:
        return any(_fits(parts[skipped:], pattern[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])

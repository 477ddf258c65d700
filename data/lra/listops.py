"""ListOps: nested operations on lists of digits, ten classes (Nangia and Bowman 2018).

    [SM 4 7 [MAX 2 9 ] ] -> 0

Generated as Long Range Arena does (Tay et al. 2020, section 2.2; google-research/long-range-arena,
lra_benchmarks/data/listops.py): the same distribution, from our own random numbers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from data.files import check_regular
from data.lra.store import Sequences

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSE = "]"
SYMBOLS = (*"0123456789", *OPERATORS, CLOSE)
"""Symbol i has token id i + 1; digit d therefore has id d + 1."""
VOCAB_SIZE = len(SYMBOLS) + 1
N_CLASSES = 10
MAX_LENGTH = 2000
"""Longer sequences are cut to it by the benchmark; generated ones have at most 1999 tokens."""
FORMULA_FILE = "basic_{split}.tsv"  # name of the benchmark's own files
SPLIT_SIZES = {"train": 96_000, "val": 2_000, "test": 2_000}

MAX_DEPTH = 10
MAX_ARGUMENTS = 10
OPERATOR_PROBABILITY = 0.25
SHORTEST, LONGEST = 501, 1999  # tokens of the formulas that are kept, brackets included

FIRST_OPERATOR_ID = SYMBOLS.index(OPERATORS[0]) + 1
CLOSE_ID = SYMBOLS.index(CLOSE) + 1

_HEADER = "Source\tTarget"
_IDS = {symbol: number for number, symbol in enumerate(SYMBOLS, start=1)}
_APPLY: tuple[Callable[[Sequence[int]], int], ...] = (
    min,
    max,
    lambda values: int(median(values)),
    lambda values: sum(values) % 10,
)

Formula = tuple[np.ndarray, int]  # token ids, uint8 (length), and the value


def evaluate(tokens: Iterable[int]) -> int:
    """Compute what a formula is worth; raises ValueError where the token ids are none."""
    open_operators: list[tuple[int, list[int]]] = []
    value: int | None = None
    for position, token in enumerate(tokens):
        if value is not None:
            raise ValueError(f"token {position} comes after the formula's end")
        if not 1 <= token <= CLOSE_ID:
            raise ValueError(f"token {position} has id {token}, which must lie in 1..{CLOSE_ID}")
        if FIRST_OPERATOR_ID <= token < CLOSE_ID:
            open_operators.append((token - FIRST_OPERATOR_ID, []))
            continue
        if token == CLOSE_ID:
            if not open_operators:
                raise ValueError(f"token {position} closes what was not opened")
            operator, arguments = open_operators.pop()
            if not arguments:
                raise ValueError(f"token {position} closes an operator without arguments")
            result = _APPLY[operator](arguments)
        else:
            result = token - 1
        if open_operators:
            open_operators[-1][1].append(result)
        else:
            value = result
    if value is None:
        raise ValueError(f"{len(open_operators)} operators are never closed")
    return value


def to_source(tokens: Iterable[int]) -> str:
    """Write a formula as the benchmark's files do, as a tree of two children a node.

    [SM 4 7 ] becomes ( ( ( [SM 4 ) 7 ) ] ).
    """
    levels: list[list[str]] = [[]]
    for token in tokens:
        text = SYMBOLS[token - 1]
        if FIRST_OPERATOR_ID <= token < CLOSE_ID:
            levels.append([text])
            continue
        if token == CLOSE_ID:
            operator, *arguments = levels.pop()
            chain = " ) ".join([*arguments, CLOSE])
            text = "( " * (len(arguments) + 1) + f"{operator} {chain} )"
        levels[-1].append(text)
    return levels[0][0]


def parse(source: str) -> np.ndarray:
    """Token ids, uint8 (length), of symbols between blanks; parentheses are left out.

    Raises:
        ValueError: There is another symbol; what the symbols mean is for `evaluate` to check.
    """
    symbols = [word for word in source.split() if word not in ("(", ")")]
    if unknown := sorted(set(symbols) - _IDS.keys()):
        raise ValueError(f"unknown symbols {unknown[:5]}; there are {' '.join(SYMBOLS)}")
    return np.array([_IDS[symbol] for symbol in symbols], dtype=np.uint8)


def find_tsv(source: Path) -> dict[str, Path]:
    """The benchmark's files of the three splits in a folder, or in its listops-1000; raises
    ValueError where they are not there."""
    for folder in (source, source / "listops-1000"):
        paths = {split: folder / FORMULA_FILE.format(split=split) for split in SPLIT_SIZES}
        if all(path.exists() for path in paths.values()):
            return paths
    names = FORMULA_FILE.format(split="{train,val,test}")
    raise ValueError(
        f"source={source} must hold {names}; leave the source out to generate formulas."
    )


def read_tsv(path: Path) -> Iterator[Formula]:
    """Read one of the benchmark's files, formula by formula.

    Raises:
        ValueError: A row is malformed, or its value is wrong; names file and line.
    """
    check_regular(path)
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                if number > 1:
                    yield _parse_row(line.rstrip("\n"))
                elif line.rstrip("\n") != _HEADER:
                    raise ValueError(f"the first line must be {_HEADER!r}, but is {line[:60]!r}")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}; repair or remove it.") from error


def write_tsv(path: Path, formulas: Iterable[Formula]) -> None:
    """Write formulas as the benchmark's files have them."""
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{_HEADER}\n")
        for tokens, value in formulas:
            file.write(f"{to_source(tokens.tolist())}\t{value}\n")


def _parse_row(line: str) -> Formula:
    source, tab, target = line.partition("\t")
    if not tab or target not in tuple("0123456789"):
        raise ValueError(f"a row must be a formula, a tab and a digit, but ends in {line[-20:]!r}")
    tokens = parse(source)
    value = evaluate(tokens.tolist())
    if value != int(target):
        raise ValueError(f"the formula is worth {value}, but the row says {target}")
    if "(" in source and source != to_source(tokens.tolist()):
        raise ValueError("the parentheses do not stand where the benchmark's do")
    return tokens, value


def yardsticks(train: Sequences, test: Sequences) -> dict[str, float]:
    """Accuracy in percent on `test` of readers of a part of each formula, which learned on `train`.

    Each makes the best guess from what it sees. A model that does not beat "root_digits" has not
    learned to nest.

    Returns:
        "majority": sees nothing. "root": sees the outermost operator. "root_digits": sees it, its
        direct arguments that are digits, and how many are formulas.
    """
    views: dict[str, Callable[[Sequences], np.ndarray]] = {
        "majority": lambda split: np.zeros(len(split), np.int64),
        "root": _root_operators,
        "root_digits": _roots_and_digits,
    }
    return {name: _accuracy(view(train), view(test), train, test) for name, view in views.items()}


def _root_operators(split: Sequences) -> np.ndarray:
    """Index in OPERATORS of each formula's outermost operator, int64 (n)."""
    return split.all_tokens()[split.offsets[:-1]].astype(np.int64) - FIRST_OPERATOR_ID


def _roots_and_digits(split: Sequences) -> np.ndarray:
    """A code, int64 (n), of the outermost operator, its value of the digits among its direct
    arguments, and how many of these are formulas."""
    tokens, n = split.all_tokens(), len(split)
    closes = tokens == CLOSE_ID
    operators = (tokens >= FIRST_OPERATOR_ID) & ~closes
    # formulas are balanced and at most 9 deep, so the sum starts at 0 in each and fits int8
    depth = np.cumsum(operators.astype(np.int8) - closes.astype(np.int8), dtype=np.int8)
    formula = np.repeat(np.arange(n, dtype=np.int32), split.lengths)
    direct = (tokens < FIRST_OPERATOR_ID) & (depth == 1)
    subtrees = np.bincount(formula[operators & (depth == 2)], minlength=n)
    counts = np.zeros((n, N_CLASSES), np.int64)
    np.add.at(counts, (formula[direct], tokens[direct].astype(np.int64) - 1), 1)
    root = _root_operators(split)
    return (root * (N_CLASSES + 1) + _applied(root, counts)) * (MAX_ARGUMENTS + 1) + subtrees


def _applied(operators: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Each operator's value of the digits that its row counts, N_CLASSES where there is none."""
    n_digits = counts.sum(1)
    smaller = np.cumsum(counts, axis=1)

    def ranked(rank: np.ndarray) -> np.ndarray:
        return (smaller <= rank[:, None]).sum(1)

    values = np.choose(
        operators,
        [
            ranked(np.zeros_like(n_digits)),
            ranked(n_digits - 1),
            (ranked((n_digits - 1) // 2) + ranked(n_digits // 2)) // 2,
            counts @ np.arange(N_CLASSES) % N_CLASSES,
        ],
    )
    return np.where(n_digits == 0, N_CLASSES, values)


def _accuracy(seen: np.ndarray, asked: np.ndarray, train: Sequences, test: Sequences) -> float:
    counts = np.zeros((max(seen.max(), asked.max()) + 1, N_CLASSES), np.int64)
    np.add.at(counts, (seen, train.labels), 1)
    return 100 * float((counts.argmax(1)[asked] == test.labels).mean())

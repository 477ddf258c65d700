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
"""Symbol i has token id i + 1, so digit d has id d + 1."""
VOCAB_SIZE = len(SYMBOLS) + 1
N_CLASSES = 10
MAX_LENGTH = 2000
"""Length to which the benchmark truncates sequences; generated ones have at most 1999 tokens."""
FORMULA_FILE = "basic_{split}.tsv"  # name of the benchmark's own files
SPLIT_SIZES = {"train": 96_000, "val": 2_000, "test": 2_000}

MAX_DEPTH = 10
MAX_ARGUMENTS = 10
OPERATOR_PROBABILITY = 0.25
SHORTEST, LONGEST = 501, 1999  # tokens of the formulas that are kept, including brackets

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

Formula = tuple[np.ndarray, int]  # token ids, uint8 (length,), and the value


def evaluate(tokens: Iterable[int]) -> int:
    """Compute the value of a formula; raises ValueError if the token ids are not a formula."""
    open_operators: list[tuple[int, list[int]]] = []
    value: int | None = None
    for position, token in enumerate(tokens):
        if value is not None:
            raise ValueError(f"token {position} comes after the formula's end")
        if not 1 <= token <= CLOSE_ID:
            raise ValueError(f"token {position} has id {token}, which must be in 1..{CLOSE_ID}")
        if FIRST_OPERATOR_ID <= token < CLOSE_ID:
            open_operators.append((token - FIRST_OPERATOR_ID, []))
            continue
        if token == CLOSE_ID:
            if not open_operators:
                raise ValueError(f"token {position} closes an operator that was not opened")
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
    """Format a formula as in the benchmark's files: a binary tree in parentheses.

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
    """Convert symbols between blanks to token ids, uint8 (length,); parentheses are left out.

    `evaluate` checks whether the symbols are a formula.

    Raises:
        ValueError: A symbol is unknown.
    """
    symbols = [word for word in source.split() if word not in ("(", ")")]
    if unknown := sorted(set(symbols) - _IDS.keys()):
        raise ValueError(f"unknown symbols {unknown[:5]}; the symbols are {' '.join(SYMBOLS)}")
    return np.array([_IDS[symbol] for symbol in symbols], dtype=np.uint8)


def find_tsv(source: Path) -> dict[str, Path]:
    """Find the benchmark's three files in a folder, or in its listops-1000.

    Raises:
        ValueError: A file is missing.
    """
    for folder in (source, source / "listops-1000"):
        paths = {split: folder / FORMULA_FILE.format(split=split) for split in SPLIT_SIZES}
        if all(path.exists() for path in paths.values()):
            return paths
    names = FORMULA_FILE.format(split="{train,val,test}")
    raise ValueError(
        f"source={source} must hold {names}; leave the source out to generate formulas."
    )


def read_tsv(path: Path) -> Iterator[Formula]:
    """Read one of the benchmark's files formula by formula.

    Raises:
        ValueError: A row is malformed or its value is wrong; the message names file and line.
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
    """Write formulas in the format of the benchmark's files."""
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
        raise ValueError(f"the value of the formula is {value}, but the row says {target}")
    if "(" in source and source != to_source(tokens.tolist()):
        raise ValueError("the parentheses are not placed as in the benchmark's files")
    return tokens, value


def baselines(train: Sequences, test: Sequences) -> dict[str, float]:
    """Accuracy in percent of baselines that see a part of each formula; fit on `train`.

    Each baseline makes the best guess from the part that it sees. A model that does not beat
    "root_digits" has not learned nesting.

    Returns:
        "majority": sees nothing. "root": sees the outermost operator. "root_digits": sees the
        outermost operator, its direct arguments that are digits, and the number of the others.
    """
    views: dict[str, Callable[[Sequences], np.ndarray]] = {
        "majority": lambda split: np.zeros(len(split), np.int64),
        "root": _root_operators,
        "root_digits": _roots_and_digits,
    }
    return {name: _accuracy(view(train), view(test), train, test) for name, view in views.items()}


def _root_operators(split: Sequences) -> np.ndarray:
    """Index in OPERATORS of each formula's outermost operator, int64 (n,)."""
    return split.all_tokens()[split.offsets[:-1]].astype(np.int64) - FIRST_OPERATOR_ID


def _roots_and_digits(split: Sequences) -> np.ndarray:
    """Code of the view of "root_digits", int64 (n,).

    It combines the outermost operator, its value on the digits among its direct arguments, and the
    number of direct arguments that are formulas.
    """
    tokens, n = split.all_tokens(), len(split)
    closes = tokens == CLOSE_ID
    operators = (tokens >= FIRST_OPERATOR_ID) & ~closes
    # Formulas are balanced and at most 9 deep: the sum is 0 before each one, and fits into int8.
    depth = np.cumsum(operators.astype(np.int8) - closes.astype(np.int8), dtype=np.int8)
    formula = np.repeat(np.arange(n, dtype=np.int32), split.lengths)
    direct = (tokens < FIRST_OPERATOR_ID) & (depth == 1)
    subtrees = np.bincount(formula[operators & (depth == 2)], minlength=n)
    counts = np.zeros((n, N_CLASSES), np.int64)
    np.add.at(counts, (formula[direct], tokens[direct].astype(np.int64) - 1), 1)
    root = _root_operators(split)
    return (root * (N_CLASSES + 1) + _apply_to_digits(root, counts)) * (
        MAX_ARGUMENTS + 1
    ) + subtrees


def _apply_to_digits(operators: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Value of each operator on the digits that its row counts; N_CLASSES if there are none."""
    n_digits = counts.sum(1)
    cumulative = np.cumsum(counts, axis=1)

    def digit_at(rank: np.ndarray) -> np.ndarray:
        # in sorted order, the digit at `rank` is the first whose cumulative count exceeds it
        return (cumulative <= rank[:, None]).sum(1)

    values = np.choose(
        operators,
        [
            digit_at(np.zeros_like(n_digits)),
            digit_at(n_digits - 1),
            (digit_at((n_digits - 1) // 2) + digit_at(n_digits // 2)) // 2,
            counts @ np.arange(N_CLASSES) % N_CLASSES,
        ],
    )
    return np.where(n_digits == 0, N_CLASSES, values)


def _accuracy(
    train_views: np.ndarray, test_views: np.ndarray, train: Sequences, test: Sequences
) -> float:
    counts = np.zeros((max(train_views.max(), test_views.max()) + 1, N_CLASSES), np.int64)
    np.add.at(counts, (train_views, train.labels), 1)
    return 100 * float((counts.argmax(1)[test_views] == test.labels).mean())

"""What a reader of only a part of a ListOps formula scores: yardsticks for reports.

Each is the best guess from what it sees, counted on the training split. A model that does not
beat "root_digits" has not learned to nest.
"""

import numpy as np

from data.lra.listops import CLOSE_ID, FIRST_OPERATOR_ID, N_CLASSES, OPERATORS
from data.lra.store import Sequences

_MIN, _MAX, _MED, _SM = range(len(OPERATORS))
_NO_DIGIT = N_CLASSES
_MAX_SUBTREES = 10


def yardsticks(train: Sequences, test: Sequences) -> dict[str, float]:
    """Accuracy in percent on `test` of guesses learned on `train`.

    Returns:
        "majority": sees nothing. "root": sees the outermost operator. "root_digits": sees it, its
        direct arguments that are digits, and how many are formulas.
    """
    views = {"majority": _nothing, "root": root_operator, "root_digits": root_and_digits}
    return {name: _accuracy(view, train, test) for name, view in views.items()}


def root_operator(split: Sequences) -> np.ndarray:
    """Index in OPERATORS of each formula's outermost operator, int64 (n)."""
    return split.tokens[split.offsets[:-1]].astype(np.int64) - FIRST_OPERATOR_ID


def root_and_digits(split: Sequences) -> np.ndarray:
    """A code, int64 (n), of what the direct arguments tell.

    Of operator, the operator applied to the digits among its direct arguments, and how many direct
    arguments are formulas.
    """
    tokens = np.asarray(split.tokens)
    n = len(split)
    operators, closes = _is_operator(tokens), tokens == CLOSE_ID
    # formulas are balanced and at most 9 deep, so the sum starts at 0 in each and fits int8
    depth = np.cumsum(operators.astype(np.int8) - closes.astype(np.int8), dtype=np.int8)
    formula = np.repeat(np.arange(n, dtype=np.int32), split.lengths)
    direct = ~operators & ~closes & (depth == 1)
    subtrees = np.bincount(formula[operators & (depth == 2)], minlength=n)
    counts = np.zeros((n, N_CLASSES), np.int64)
    np.add.at(counts, (formula[direct], tokens[direct].astype(np.int64) - 1), 1)
    root = root_operator(split)
    return (root * (_NO_DIGIT + 1) + _applied(root, counts)) * (_MAX_SUBTREES + 1) + subtrees


def _applied(operators: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Each operator's value of the digits that its row counts, _NO_DIGIT where there is none."""
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
    return np.where(n_digits == 0, _NO_DIGIT, values)


def _accuracy(view, train: Sequences, test: Sequences) -> float:
    seen, asked = view(train), view(test)
    counts = np.zeros((max(seen.max(), asked.max()) + 1, N_CLASSES), np.int64)
    np.add.at(counts, (seen, train.labels), 1)
    return 100 * float((counts.argmax(1)[asked] == test.labels).mean())


def _nothing(split: Sequences) -> np.ndarray:
    return np.zeros(len(split), np.int64)


def _is_operator(tokens: np.ndarray) -> np.ndarray:
    return (tokens >= FIRST_OPERATOR_ID) & (tokens < CLOSE_ID)

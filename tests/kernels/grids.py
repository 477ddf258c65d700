"""Which shapes, options and dtypes the tests of attention go through: few in the interpreter.

A GPU tries all combinations, in bf16. The interpreter takes a hundred times as long and has no
right bf16 products: it tries fp32 and fp16, and of the combinations as many as a fault needs to
show, which is where two values meet, hardly ever where three do.
"""

import itertools

import pytest
import torch

on_gpu = pytest.mark.gpu
in_bf16 = pytest.param(torch.bfloat16, marks=on_gpu)
causal_or_full = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
CAUSAL_OR_FULL = [True, False]
INTERPRETED = [torch.float32, torch.float16]


def each_pair(**axes):
    """Parametrize by these arguments and `dtype`: any two values of two arguments meet.

    Args:
        axes: the values of each argument.
    """
    return _parametrize(axes, covering_pairs([*axes.values(), INTERPRETED]))


def each_value(**axes):
    """Parametrize by these arguments and `dtype`: each value comes up, beside any of the others.

    Args:
        axes: the values of each argument.
    """
    columns = [*axes.values(), INTERPRETED]
    longest = max(map(len, columns))
    return _parametrize(axes, [tuple(c[i % len(c)] for c in columns) for i in range(longest)])


def each_of(names, interpreted, on_a_gpu):
    """Parametrize by `names` and by the cases of the interpreter, and those of a GPU."""
    on_a_gpu = [pytest.param(*case, marks=on_gpu, id=_name(names, case)) for case in on_a_gpu]
    interpreted = [pytest.param(*case, id=_name(names, case)) for case in interpreted]
    return pytest.mark.parametrize(names, [*interpreted, *on_a_gpu])


def covering_pairs(columns):
    """Rows of one value a column, in which any two values of two columns stand together."""
    rows = list(itertools.product(*(range(len(values)) for values in columns)))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        chosen.append(best)
    return [tuple(values[i] for values, i in zip(columns, row, strict=True)) for row in chosen]


def _pairs(row):
    return set(itertools.combinations(enumerate(row), 2))


def _parametrize(axes, interpreted):
    bf16 = itertools.product(*axes.values(), [torch.bfloat16])
    return each_of([*axes, "dtype"], interpreted, bf16)


def _name(names, case):
    """As pytest names a case, but for tuples and dtypes, which it only counts."""

    def of_value(name, value):
        if name == "causal":
            return "causal" if value else "full"
        return str(value).removeprefix("torch.").strip("()").replace(", ", "-")

    return "-".join(map(of_value, names, case))

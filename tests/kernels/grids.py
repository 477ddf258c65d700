"""Grids of shapes, options and dtypes for the tests of attention: small in the interpreter.

A GPU runs all combinations, in bf16. The interpreter takes a hundred times as long, and its bf16
products are wrong: it runs fp32 and fp16, and only enough combinations to show a fault. Most
faults need two values together, hardly any needs three.
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
    """Parametrize by these arguments and `dtype`, covering each pair of values of two arguments.

    Args:
        axes: the values of each argument.
    """
    return _parametrize(axes, covering_pairs([*axes.values(), INTERPRETED]))


def each_value(**axes):
    """Parametrize by these arguments and `dtype`, covering each value at least once.

    Args:
        axes: the values of each argument.
    """
    columns = [*axes.values(), INTERPRETED]
    longest = max(map(len, columns))
    return _parametrize(axes, [tuple(c[i % len(c)] for c in columns) for i in range(longest)])


def each_of(names, interpreted, on_a_gpu):
    """Parametrize by `names`, with separate cases for the interpreter and for a GPU."""
    on_a_gpu = [pytest.param(*case, marks=on_gpu, id=_name(names, case)) for case in on_a_gpu]
    interpreted = [pytest.param(*case, id=_name(names, case)) for case in interpreted]
    return pytest.mark.parametrize(names, [*interpreted, *on_a_gpu])


def covering_pairs(columns):
    """Rows of one value per column that cover each pair of values of two columns."""
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
    """Test id like pytest's, but with tuples and dtypes spelled out instead of numbered."""

    def value_id(name, value):
        if name == "causal":
            return "causal" if value else "full"
        return str(value).removeprefix("torch.").strip("()").replace(", ", "-")

    return "-".join(map(value_id, names, case))

"""Gains of a longer context over training tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from evaluation.markdown import dict_table, difference_cell, digits
from evaluation.results import Row
from evaluation.style import COLOURS
from experiments.harness import Result
from experiments.reports import tokens_text
from experiments.table4.forest import differences
from experiments.table4.models import BUDGETS

LINES = {
    ("4k", "1k"): ("4K from scratch", COLOURS[1]),
    ("1k_to_4k", "1k"): ("1K grows to 4K", COLOURS[0]),
    ("1k_to_16k", "1k"): ("1K grows to 16K", COLOURS[2]),
}
"""Name and colour of each pair of a model and its baseline."""

FAR = 10
"""A fitted line is drawn up to this multiple of the most tokens."""
_MIN_POINTS = 3
"""Fewest points of a fit: a line through two always fits, whatever the third would be."""
_DRAWS = 4000


class Point(NamedTuple):
    """A difference on identical tokens after some training tokens, nats per token."""

    tokens: float
    nats: float
    low: float
    high: float
    batch_tokens: int
    """Tokens per step. More of them need fewer steps, which alone changes the difference."""


@dataclass(frozen=True)
class Fit:
    """Straight line over the logarithm of tokens, with lines that the intervals also allow."""

    lines: np.ndarray
    """Slope and intercept over log(tokens), the fitted line first, (1 + n_draws, 2)."""

    def at(self, tokens: np.ndarray) -> np.ndarray:
        """Fitted values with the middle 95% of all lines: mean, low, high, (3, n_tokens)."""
        values = self.lines @ np.stack([np.log(tokens), np.ones_like(tokens)])
        return np.stack([values[0], *np.quantile(values[1:], [0.025, 0.975], axis=0)])

    @property
    def crossing(self) -> np.ndarray:
        """Tokens at which the fitted line crosses zero, with the middle 95% of all lines, (3,).

        inf if a line never falls to zero.
        """
        slope, intercept = self.lines.T
        with np.errstate(divide="ignore", over="ignore"):
            tokens = np.where(slope < 0, np.exp(-intercept / slope), np.inf)
        return np.array([tokens[0], *np.quantile(tokens[1:], [0.025, 0.975], method="nearest")])


def points(results: Sequence[Result], pair: tuple[str, str]) -> list[Point]:
    """Points of a pair in all results that have it, by tokens."""
    of_pair = []
    for result in results:
        difference = differences(result).get(pair)
        if difference is not None:
            (rows,) = result["rows"].values()
            tokens = next(row["tokens"] for row in rows if row["label"] == pair[0])
            batch_tokens = BUDGETS[result["budget"]].batch_tokens
            low, high = difference["interval"]
            of_pair.append(Point(tokens, difference["nats"], low, high, batch_tokens))
    return sorted(of_pair)


def fit(points: Sequence[Point]) -> Fit | None:
    """Fit a line to points of the same batch size.

    None if they are fewer than three, or if the line misses an interval: then they are not on a
    line, or differ by chance more than the intervals say.

    Other lines are fitted to draws from the intervals, as if those were normal and independent.
    """
    if len(points) < _MIN_POINTS:
        return None
    nats = np.array([point.nats for point in points])
    sigma = np.array([(point.high - point.low) / (2 * 1.96) for point in points])
    log_tokens = np.log([point.tokens for point in points])
    draws = np.random.default_rng(0).normal(nats, sigma, (_DRAWS, len(points)))
    lines = np.polyfit(log_tokens, np.vstack([nats, draws]).T, deg=1, w=1 / sigma)
    misses = np.abs(np.polyval(lines[:, 0], log_tokens) - nats) > 1.96 * sigma
    return None if misses.any() else Fit(lines.T)


def differences_table(*results: Result) -> str:
    """Markdown table: the difference of each pair, nats per token, in each result."""
    return dict_table(map(_difference_cells, results))


def _difference_cells(result: Result) -> dict[str, str]:
    budget, found = BUDGETS[result["budget"]], differences(result)
    rows = {name: found.get(pair) for pair, (name, _) in LINES.items()}
    seeds = {row["seeds"] for row in rows.values() if row is not None}
    return {
        "training tokens": tokens_text(budget.steps * budget.batch_tokens),
        "tokens a step": f"{budget.batch_tokens:,}",
        "steps": f"{budget.steps:,}",
        "seeds": ", ".join(map(str, sorted(seeds))),
        **{f"{name}, minus 1K, nats": difference_cell(row) for name, row in rows.items()},
    }


def history_table(*evaluations: Result) -> str:
    """Gain of the context that grows to 4K, and how much worse it is with less distant text.

    `evaluations` are results of `evaluation.tables.tabulate` for several budgets.
    """
    return dict_table(map(_history_cells, evaluations))


def _history_cells(result: Result, label: str = "1k_to_4k", short: int = 1024) -> dict[str, str]:
    """Cells on a model, which is also compared with the first model."""
    runs = [run for run in result["runs"] if run["label"] == label]
    full = _row(result["as_trained"], label)
    cut = _row(result["strided"], label, history=short)
    shuffled, replaced = (
        _row(result["control"], label, control=control) for control in ("shuffle", "replace")
    )
    has_key = any(row["label"] == label for row in result["key"])
    key = _row(result["as_trained_key"], label) if has_key else {"perplexity": None}
    cut_key = _row(result["key"], label, history=short) if has_key else {"longest_difference": None}
    first = full["difference"]["to_label"]
    return {
        "training tokens": tokens_text(runs[0]["tokens"]),
        "tokens a step": f"{runs[0]['tokens'] // runs[0]['step']:,}",
        "seeds": str(len(runs)),
        f"minus {first}, nats": difference_cell(full["difference"]),
        f"cost of {short:,} tokens, nats": difference_cell(cut["longest_difference"]),
        f"minus {first}, both with {short:,} tokens, nats": difference_cell(cut["difference"]),
        "cost of shuffled distant text, nats": difference_cell(shuffled["difference"]),
        "cost of replaced distant text, nats": difference_cell(replaced["difference"]),
        "LongPPL": digits(key["perplexity"], ".2f"),
        f"cost of {short:,} tokens on key tokens, nats": difference_cell(
            cut_key["longest_difference"]
        ),
    }


def _row(rows: Sequence[Row], label: str, **wanted: object) -> Row:
    """Row of a model that has these values."""
    (row,) = (r for r in rows if r["label"] == label and wanted.items() <= r.items())
    return row


def draw(*results: Result) -> Figure:
    """Draw each pair over training tokens; open marks have smaller steps than filled ones.

    A fit, if there is one, is to the largest steps, and dashed beyond the measurements.
    """
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="black", lw=1)
    axes.set_xscale("log")
    large = max(BUDGETS[result["budget"]].batch_tokens for result in results)
    for pair, (name, colour) in LINES.items():
        of_pair = points(results, pair)
        if not of_pair:
            continue
        fitted = [point for point in of_pair if point.batch_tokens == large]
        others = [point for point in of_pair if point.batch_tokens != large]
        _errorbars(axes, others, colour, filled=False)
        _errorbars(axes, fitted, colour, filled=True)
        line = fit(fitted)
        if line is not None:
            _band(axes, line, fitted, colour)
            if fitted[-1].nats > 0:
                name += f"; {_crossing(line)}"
        axes.plot([], [], "o", color=colour, label=name)
    small = {BUDGETS[result["budget"]].batch_tokens for result in results} - {large}
    for tokens, face in [(large, "black"), *((tokens, "white") for tokens in small)]:
        axes.plot([], [], "ok", mfc=face, label=f"{tokens:,} tokens a step")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: tokens_text(tokens)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("training tokens")
    axes.set_ylabel("better  ←   nats per token, minus 1K   →  worse")
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    return figure


def _errorbars(axes: Axes, marks: Sequence[Point], colour: str, *, filled: bool) -> None:
    if marks:
        tokens, nats, low, high, _ = np.array(marks).T
        look = {"color": colour, "mfc": colour if filled else "white", "ms": 6, "capsize": 3}
        axes.errorbar(tokens, nats, yerr=[nats - low, high - nats], fmt="o", lw=1.5, **look)


def _band(axes: Axes, line: Fit, fitted: Sequence[Point], colour: str) -> None:
    """Draw a fitted line and its band, dashed where it is an extrapolation."""
    first, last = fitted[0].tokens, fitted[-1].tokens
    for tokens, style in (
        (np.geomspace(first, last), "-"),
        (np.geomspace(last, FAR * last), "--"),
    ):
        mean, low, high = line.at(tokens)
        axes.plot(tokens, mean, style, color=colour, lw=1)
        axes.fill_between(tokens, low, high, color=colour, alpha=0.12, lw=0)


def _crossing(line: Fit) -> str:
    """Say where a fitted line crosses zero."""
    tokens, low, high = line.crossing
    if not np.isfinite(tokens):
        return "the fitted line does not fall to zero"
    upper = f"to {tokens_text(high)}" if np.isfinite(high) else "or never"
    return f"extrapolated to zero at {tokens_text(tokens)} tokens ({tokens_text(low)} {upper})"

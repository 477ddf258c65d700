"""Gains of a longer context over training tokens."""

import math
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

_PARAMETERS = 3
"""Number that a curve has, and fewest points of a fit."""
_POWERS = np.geomspace(0.05, 5, 400)
"""Powers of a curve that are tried."""
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
class Curve:
    """Curve `limit + scale * (tokens / first)**-power`, with curves that the intervals also allow.

    Each array has the fitted value first, (1 + n_draws,).
    """

    first: float
    """Fewest tokens of the points."""
    limit: np.ndarray
    scale: np.ndarray
    power: np.ndarray

    def at(self, tokens: np.ndarray) -> np.ndarray:
        """Fitted nats, then the ends of the middle 95% of all other curves, (3, n_tokens)."""
        values = self.limit + self.scale * (tokens[:, None] / self.first) ** -self.power
        return np.stack([values[:, 0], *np.quantile(values[:, 1:], [0.025, 0.975], axis=1)])

    @property
    def crossing(self) -> float:
        """Tokens at which the fitted curve falls to zero; inf if it never does."""
        scale, limit, power = self.scale[0], self.limit[0], self.power[0]
        if scale <= 0 or limit >= 0:
            return math.inf
        return self.first * (scale / -limit) ** (1 / power)


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


def fit(points: Sequence[Point]) -> Curve | None:
    """Fit a curve to points of the same batch size.

    None if they are fewer than its three parameters, or if it misses an interval: then the
    difference does not fall or rise steadily, or varies by chance more than the intervals say.
    A curve through three points is not tested by them.

    Other curves are fitted to draws from the intervals, as if those were symmetric, normal and
    independent. But points share their documents, and an interval of one seed leaves out seeds.
    """
    if len(points) < _PARAMETERS:
        return None
    nats = np.array([point.nats for point in points])
    sigma = np.array([(point.high - point.low) / (2 * 1.96) for point in points])
    draws = np.random.default_rng(0).normal(nats, sigma, (_DRAWS, len(points)))
    targets = (np.vstack([nats, draws]) / sigma).T  # (n_points, n_curves)
    tokens = np.array([point.tokens for point in points])
    # For each power, a linear fit: (n_powers, n_points, 2) @ (n_powers, 2, n_curves). An iterative
    # fit (scipy's curve_fit) does not converge if the points are level.
    decay = (tokens / tokens[0]) ** -_POWERS[:, None]
    designs = np.stack([decay, np.ones_like(decay)], axis=-1) / sigma[:, None]
    fits = np.linalg.pinv(designs) @ targets
    misses = designs @ fits - targets
    best = (misses**2).sum(1).argmin(0)
    scale, limit = fits[best, :, np.arange(len(best))].T
    if (np.abs(misses[best[0], :, 0]) > 1.96).any():
        return None
    return Curve(tokens[0], limit, scale, _POWERS[best])


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
    """How much worse each 4K model is with less distant text, and with the history of `1k`.

    `evaluations` are results of `evaluation.tables.tabulate` for several budgets.
    """
    return dict_table(
        _history_cells(result, label) for label in ("1k_to_4k", "4k") for result in evaluations
    )


def _history_cells(result: Result, label: str, short: int = 1024) -> dict[str, str]:
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
        "model": label,
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

    A curve, if there is one, is fitted to the largest steps.
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
        curve = fit(fitted)
        if curve is not None:
            _band(axes, curve, fitted, colour)
            if fitted[0].nats > 0 and math.isfinite(curve.crossing):
                where = "extrapolated to" if curve.crossing > fitted[-1].tokens else "the curve is"
                name += f"; {where} zero at {tokens_text(curve.crossing)}"
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


def _band(axes: Axes, curve: Curve, fitted: Sequence[Point], colour: str) -> None:
    """Draw a fitted curve and its band between the points."""
    tokens = np.geomspace(fitted[0].tokens, fitted[-1].tokens)
    nats, low, high = curve.at(tokens)
    axes.plot(tokens, nats, color=colour, lw=1)
    axes.fill_between(tokens, low, high, color=colour, alpha=0.12, lw=0)

"""Repeated passages: how much a model gains from an earlier copy, by its distance and length.

A passage is scored twice in the same document: in its original text, and with a copy of it inserted
some distance before. Only its second half is scored, so that the first half can serve as a cue.

    without the copy   | earlier text  text | between | passage |
    with the copy             | text | copy | between | passage |

Both prompts have the same length, and all tokens after the copy are equal and at equal positions.
The difference of the losses is therefore what the model gains from the copy: in-context copying, as
by induction heads (Olsson et al. 2022, arXiv 2209.11895).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from data.text.shards import TokenStream
from evaluation.markdown import dict_table, with_interval
from evaluation.results import Row, without_nan
from evaluation.statistics import Estimate, estimate
from evaluation.style import name_ends, styles_of
from evaluation.sums import MIN_DOCUMENTS, Sums
from model.gpt import GPT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT_BEFORE = 64
"""Tokens of text before the copy, so that it is not at the start of the prompt."""

Losses = dict[tuple[int, int], np.ndarray]
"""By distance and length, (n_passages, 2) losses without and with the copy, in nats, summed over
the scored tokens."""


class Passages(NamedTuple):
    """Ends of the passages in a stream. Passages of all lengths end at the same positions."""

    ends: np.ndarray
    """(n_passages,) stream position after the last token."""
    units: np.ndarray
    """(n_passages,) unit of the intervals: number of the document, or of the passage."""
    n_documents: int
    """Number of documents that are long enough."""

    @property
    def are_units(self) -> bool:
        """Whether intervals are over passages, because there are fewer than MIN_DOCUMENTS."""
        return self.n_documents < MIN_DOCUMENTS


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Distances and lengths of repeated passages.

    Raises:
        ValueError: a number is out of range or given twice, or a copy would overlap its passage.
    """

    distances: Sequence[int]
    """Tokens from the start of the copy to the start of the passage."""
    lengths: Sequence[int]
    """Tokens of the passages. The last length // 2 are scored."""
    n: int
    """Number of passages for each distance and length."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, numbers in (("distances", self.distances), ("lengths", self.lengths)):
            if not numbers or len(set(numbers)) < len(numbers):
                raise ValueError(f"{name}={[*numbers]} must be one or more different numbers")
        if min(self.lengths) < 2:
            raise ValueError(
                f"length={min(self.lengths)} must be at least 2: the second half is scored"
            )
        if min(self.distances) < max(self.lengths):
            raise ValueError(
                f"distance={min(self.distances)} must be at least length={max(self.lengths)}, so "
                "that the copy ends before the passage. Choose longer distances or shorter passages"
            )
        if self.n < 1:
            raise ValueError(f"passages={self.n} must be at least 1")

    def cells(self, context_length: int) -> list[tuple[int, int]]:
        """Pairs of distance and length that fit a context."""
        pairs = product(self.distances, self.lengths)
        # the last token is only predicted
        return [pair for pair in pairs if TEXT_BEFORE + sum(pair) - 1 <= context_length]

    def passages(self, stream: TokenStream, context_length: int) -> Passages:
        """Draw passages with enough text before them for all distances that fit the context.

        Documents are used in turn, so that they have equally many passages, or one more.

        Raises:
            ValueError: no distance fits, or no document is long enough.
        """
        cells = self.cells(context_length)
        if not cells:
            shortest = TEXT_BEFORE + min(self.distances) + min(self.lengths) - 1
            raise ValueError(
                f"the longest model.context_length={context_length} must be at least {shortest} "
                f"for distance={min(self.distances)} and length={min(self.lengths)}. Choose "
                "shorter --distances, or a run with a longer context"
            )
        needed = TEXT_BEFORE + max(map(sum, cells))
        starts = stream.document_starts
        stops = np.append(starts[1:], len(stream)) - 1  # without the end of text
        (long_enough,) = np.nonzero(stops - starts >= needed)
        if not len(long_enough):
            raise ValueError(
                f"no document of {stream.split} in {stream.path} has the {needed} tokens that "
                f"distances up to {max(cells)[0]} need: the longest has {max(stops - starts)}. "
                "Choose shorter --distances, or a text with longer documents (--data)"
            )
        rng = np.random.default_rng(self.seed)
        documents = np.resize(rng.permutation(long_enough), self.n)
        ends = rng.integers(starts[documents] + needed, stops[documents], endpoint=True)
        passages = Passages(ends, documents, len(long_enough))
        return passages._replace(units=np.arange(self.n)) if passages.are_units else passages


def prompts(
    stream: TokenStream, end: int, distance: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Build the two prompts of a passage, without and with its copy: int64 token ids.

    Args:
        stream: the text.
        end: stream position after the passage.
        distance: tokens from the start of the copy to that of the passage.
        length: tokens of the passage.
    """
    n_tokens = TEXT_BEFORE + length + distance
    without = stream.read(end - n_tokens, n_tokens)
    text, passage = without[:-distance], without[-length:]
    return without, np.concatenate([text[-TEXT_BEFORE:], passage, without[-distance:]])


@torch.no_grad()
def score(
    model: GPT,
    stream: TokenStream,
    repeats: Repeats,
    passages: Passages,
    *,
    batch_tokens: int,
    context: Callable[[], AbstractContextManager],
) -> Losses:
    """Score the second halves of all passages at the distances that fit the model's context.

    Args:
        model: the model, in evaluation mode.
        stream: the text.
        repeats: distances and lengths.
        passages: the passages.
        batch_tokens: tokens per forward pass, which reads at least the two prompts of a passage.
        context: context manager for the forward pass, such as autocast.

    Raises:
        FloatingPointError: a loss is not finite.
    """
    device = next(model.parameters()).device
    losses = {}
    for distance, length in repeats.cells(model.config.context_length):
        batch_size = max(1, batch_tokens // (2 * (TEXT_BEFORE + distance + length)))
        sums = []
        for first in range(0, repeats.n, batch_size):
            ends = passages.ends[first : first + batch_size].tolist()
            pairs = np.stack([prompts(stream, end, distance, length) for end in ends])
            tokens = torch.from_numpy(pairs).to(device).flatten(0, 1)
            with context():
                loss = model(tokens[:, :-1], tokens[:, -(length // 2) :], reduction="none")
            sums.append(loss.double().sum(1).view(-1, 2).cpu().numpy())
        losses[distance, length] = np.concatenate(sums)
        if not np.isfinite(losses[distance, length]).all():
            raise FloatingPointError(
                f"the losses of passages of {length} tokens at a distance of {distance} are not "
                "finite, so the model is broken. Try another checkpoint with --checkpoint"
            )
    return losses


def tabulate(losses: Losses, repeats: Repeats, passages: Passages) -> list[Row]:
    """Mean losses and gains of a run with 95% intervals, by length and distance.

    The gain is the loss without the copy minus the loss with it, in nats per token. Distances that
    do not fit the context have None instead.
    """
    names = ("without", "with", "gain")
    rows: list[Row] = []
    for length, distance in product(repeats.lengths, repeats.distances):
        row: Row = {"length": length, "distance": distance, **dict.fromkeys(names)}
        if (cell := losses.get((distance, length))) is not None:
            before, after = (_sums(nats, length, passages.units) for nats in cell.T)
            estimates = (estimate(before), estimate(after), estimate(before, minus=after))
            row |= {name: _numbers(*e) for name, e in zip(names, estimates, strict=True)}
        rows.append(row)
    return without_nan(rows)


def _sums(nats: np.ndarray, length: int, units: np.ndarray) -> Sums:
    """Sums by unit of (n_passages,) losses, in a single bin."""
    _, unit, counts = np.unique(units, return_inverse=True, return_counts=True)
    return Sums(
        nats=np.bincount(unit, nats)[:, None], tokens=counts[:, None] * (length // 2), n_bytes=0
    )


def _numbers(value: Estimate) -> Row:
    return {"nats": value.mean, "interval": [value.low, value.high]}


def table_of(runs: Mapping[str, Sequence[Row]]) -> str:
    """Format the gains as Markdown: a line per run and length, a column per distance of any run."""
    distances = sorted({row["distance"] for rows in runs.values() for row in rows})
    empty = {f"gain at {distance:,}": "" for distance in distances}
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for label, rows in runs.items():
        for row in rows:
            line = lines.setdefault(
                (label, row["length"]), {"run": label, "passage": f"{row['length']:,}", **empty}
            )
            if row["gain"] is not None:
                gain = with_interval(row["gain"]["nats"], row["gain"]["interval"])
                line[f"gain at {row['distance']:,}"] = gain
    return dict_table(lines.values())


def draw(runs: Mapping[str, Sequence[Row]]) -> "Figure":
    """Plot the gain over the distance: a panel for each length, a line with intervals per run."""
    from matplotlib.figure import Figure

    lengths, distances = (
        sorted({row[name] for rows in runs.values() for row in rows})
        for name in ("length", "distance")
    )
    figure = Figure(figsize=(8.5, 0.6 + 2.4 * len(lengths)), layout="constrained")
    grid = figure.subplots(len(lengths), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    styles = styles_of(runs)
    ends: list[dict[str, tuple[float, str]]] = []
    for axes, length in zip(grid, lengths, strict=True):
        ends.append({})
        for label, rows in runs.items():
            line = sorted(
                (row for row in rows if row["length"] == length and row["gain"] is not None),
                key=lambda row: row["distance"],
            )
            if not line:
                continue
            x = [row["distance"] for row in line]
            means = [row["gain"]["nats"] for row in line]
            low, high = np.array([row["gain"]["interval"] for row in line], dtype=np.float64).T
            axes.plot(x, means, ms=4, lw=1.2, **styles[label])
            axes.fill_between(x, low, high, color=styles[label]["color"], alpha=0.2, lw=0)
            ends[-1][label] = means[-1], styles[label]["color"]
        axes.axhline(0, color="black", lw=0.8, zorder=1)
        axes.grid(alpha=0.3)
        axes.set_title(f"passages of {length:,} tokens", size=10, loc="left")
    grid[0].set_ylim(grid[0].get_ylim())  # of all panels, which share it: final from here on
    for axes, panel in zip(grid, ends, strict=True):
        if panel:
            name_ends(axes, panel, gap=0.12)
    grid[-1].set_xscale("log", base=2)
    grid[-1].set_xticks(distances, [f"{distance:,}" for distance in distances])
    grid[-1].minorticks_off()
    grid[-1].set_xlabel("tokens from the copy to the passage")
    figure.supylabel("gain from the copy, nats per token", size=10)
    return figure

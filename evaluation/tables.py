"""From losses that are added up to the tables of an evaluation, as JSON can hold them.

Where windows slide, all rows are of identical tokens: those that every one of them shows nearly all
of its history (LEAST_SEEN). As the paper evaluates, windows that do not overlap leave out what does
not fill one, so that each row is of its own tokens; and a control is compared with nothing but
itself.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from evaluation.statistics import (
    Estimate,
    estimate,
    paired_half_width,
    seed_half_width,
    widen,
    with_bins,
)
from evaluation.sums import Scored, Sums, Text, bin_name, kind_of, log_bins
from evaluation.windows import Scoring

Table = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredModel:
    """One model, scored in one way, over its seeds."""

    label: str
    scoring: Scoring
    seeds: list[Sums]
    numbers: list[int]
    """Of the seeds; each is there once."""

    @property
    def mean(self) -> Sums:
        """The mean over the seeds, which all have the same tokens."""
        nats = np.mean([seed.nats for seed in self.seeds], axis=0)
        return replace(self.seeds[0], nats=nats)


def tabulate(scored: Sequence[Scored], text: Text) -> dict[str, Any]:
    """All tables of an evaluation of runs on a text.

    Returns:
        data: what was scored. runs: what was trained, one entry a run. chunk, strided: lists of
        rows, each compared with the model of the first run, documents alike. control: rows
        compared with their own model and windows, the distant part intact. as_trained and
        as_trained_chunk: one row a model, with all of its history, documents masked if it was
        trained so. chunk_position, document_position, document_length: the mean loss of those in
        logarithmic bins, and its difference to the first model.
    """
    rows = _rows(scored)
    chunk, strided, control = (_of_kind(rows, kind) for kind in ("chunk", "sliding", "control"))
    as_trained, as_trained_chunk = _as_trained(strided, scored), _as_trained(chunk, scored)
    return {
        "data": {
            "name": text.name,
            "tokens": text.tokens,
            "documents": len(text.document_lengths),
            "text_bytes": text.text_bytes,
        },
        "runs": [
            {
                "label": s.label,
                "init_from": s.config.run.init_from,
                "max_steps": s.config.optim.max_steps,
                **s.about,
            }
            for s in scored
        ],
        "chunk": [_tabulate(r, _reference(chunk, r)) for r in chunk],
        "strided": [_tabulate(r, _reference(strided, r)) for r in strided],
        "control": [_tabulate(r, _intact(control, r)) for r in control],
        "as_trained": [_tabulate(r, as_trained[0]) for r in as_trained],
        "as_trained_chunk": [_tabulate(r, as_trained_chunk[0]) for r in as_trained_chunk],
        "chunk_position": _of_whole_bins(_binned(as_trained_chunk)),
        "document_position": _binned(as_trained),
        "document_length": _binned(as_trained, lambda sums: _by_length(sums, text)),
    }


def compare(scored: Sequence[Scored], pairs: Iterable[tuple[str, str]]) -> Table:
    """Differences between the models of pairs of labels, of those pairs that are there.

    Returns:
        For each pair the difference in nats, as trained, with all of its history: chunk as the
        paper evaluates, strided on the tokens of `as_trained`; parts, of these the tokens at
        the start of a document, as far as the shortest context of all reaches (rounded up to a
        power of two), and the others; and document_position, in logarithmic bins.
    """
    rows = _rows(scored)
    shortest = min(s.config.model.context_length for s in scored)
    last_at_start = int(log_bins(np.array(shortest - 1)))
    chunk, strided = (
        {r.label: r for r in _as_trained(_of_kind(rows, kind), scored)}
        for kind in ("chunk", "sliding")
    )
    return [
        {
            "label": label,
            "to_label": other,
            "chunk": _difference(chunk[label], chunk[other]),
            "strided": _difference(strided[label], strided[other]),
            "parts": _parts(strided[label], strided[other], last_at_start),
            "document_position": _by_bin(strided[label], strided[other]),
        }
        for label, other in pairs
        if label in strided and other in strided
    ]


def _rows(scored: Iterable[Scored]) -> list[ScoredModel]:
    """One row a model and scoring, in the order of the command line."""
    rows: dict[tuple[str, Scoring], ScoredModel] = {}
    for s in scored:
        for scoring, sums in s.sums.items():
            new = ScoredModel(label=s.label, scoring=scoring, seeds=[], numbers=[])
            row = rows.setdefault((s.label, scoring), new)
            row.seeds.append(sums)
            row.numbers.append(s.number)
    return list(rows.values())


def _of_kind(rows: list[ScoredModel], kind: str) -> list[ScoredModel]:
    return [row for row in rows if kind_of(row.scoring) == kind]


def _as_trained(rows: list[ScoredModel], scored: Sequence[Scored]) -> list[ScoredModel]:
    """For each model the row with the longest history, at the smallest stride.

    Where a model was scored both ways, documents are masked if they were in training.
    """
    masked = {s.label: s.about["document_mask"] for s in scored}

    def fitness(row: ScoredModel) -> tuple[bool, int, int]:
        scoring = row.scoring
        alike = scoring.document_mask == masked[row.label]
        return alike, scoring.history, -scoring.stride

    labels = dict.fromkeys(row.label for row in rows)
    return [max((r for r in rows if r.label == label), key=fitness) for label in labels]


def _reference(rows: list[ScoredModel], row: ScoredModel) -> ScoredModel | None:
    """The first model at its longest, documents as in `row`; of several strides that of `row`."""
    stride, masked = row.scoring.stride, row.scoring.document_mask

    def fitness(r: ScoredModel) -> tuple[int, bool, int]:
        return r.scoring.history, r.scoring.stride == stride, -r.scoring.stride

    firsts = (r for r in rows if r.label == rows[0].label and r.scoring.document_mask == masked)
    return max(firsts, key=fitness, default=None)


def _intact(rows: list[ScoredModel], row: ScoredModel) -> ScoredModel | None:
    """The model and windows of a control, their distant part intact."""
    intact = replace(row.scoring, control="intact")
    return next((r for r in rows if (r.label, r.scoring) == (row.label, intact)), None)


def _tabulate(row: ScoredModel, versus: ScoredModel | None) -> dict[str, Any]:
    """Loss, perplexity and bits per byte of a row, and its difference to another."""
    whole = _whole(row.mean)
    (mean,) = estimate(whole)
    return {
        "label": row.label,
        **asdict(row.scoring),
        "tokens": int(whole.tokens.sum()),
        "bytes": whole.n_bytes,
        "nats": mean.mean,
        "nats_interval": _interval(mean),
        "nats_of_seeds": [float(s.nats.sum() / s.tokens.sum()) for s in row.seeds],
        "perplexity": math.exp(mean.mean),
        "bits_per_byte": float(whole.nats.sum()) / math.log(2) / whole.n_bytes,
        "difference": None if versus in (None, row) else _difference(row, versus),
    }


def _difference(row: ScoredModel, versus: ScoredModel) -> dict[str, Any]:
    """row - versus, nats, over the seeds that both have."""
    (gap,) = _gaps(row, versus, _whole)
    return {
        "to_label": versus.label,
        "to_history": versus.scoring.history,
        "tokens": int(row.seeds[0].tokens.sum()),
        "nats": gap.both.mean,
        "interval": _interval(gap.both),
        "interval_of_documents": _interval(gap.documents),
        "seeds": gap.seeds,
        "half_width_of_seeds": gap.half_width_of_seeds,
    }


def _parts(row: ScoredModel, versus: ScoredModel, last_at_start: int) -> Table:
    """row - versus up to this bin, and from the next one on."""
    first, edge = last_at_start + 1, 2**last_at_start

    def halves(sums: Sums) -> Sums:
        nats, tokens = (
            np.stack([bins[:, :first].sum(axis=1), bins[:, first:].sum(axis=1)], axis=1)
            for bins in (sums.nats, sums.tokens)
        )
        return replace(sums, nats=nats, tokens=tokens)

    names = f"0 to {edge - 1:,}", f"{edge:,} and more"
    counts = halves(row.mean).tokens.sum(axis=0).tolist()
    return [
        {
            "range": name,
            "tokens": count,
            "nats": _or_none(gap.both.mean),
            "interval": _interval(gap.both),
        }
        for name, count, gap in zip(names, counts, _gaps(row, versus, halves), strict=True)
    ]


def _whole(sums: Sums) -> Sums:
    """All tokens in one bin."""
    nats, tokens = (bins.sum(axis=1, keepdims=True) for bins in (sums.nats, sums.tokens))
    return replace(sums, nats=nats, tokens=tokens)


def _by_length(sums: Sums, text: Text) -> Sums:
    """Bins by the length of the document."""
    place = np.arange(len(text.document_lengths)), log_bins(text.document_lengths)
    shape = len(place[0]), int(place[1].max()) + 1
    nats, tokens = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    nats[place], tokens[place] = sums.nats.sum(axis=1), sums.tokens.sum(axis=1)
    return replace(sums, nats=nats, tokens=tokens)


class _Gap(NamedTuple):
    """The difference of two models, and how sure it is."""

    documents: Estimate
    seeds: int
    """That both have; of the model with fewer, where not in pairs."""
    half_width_of_seeds: float | None
    both: Estimate


def _gaps(row: ScoredModel, versus: ScoredModel, bins: Callable[[Sums], Sums]) -> list[_Gap]:
    """row - versus in each bin.

    Where both have several of the same seeds, or one has a single one, of these alone, in pairs:
    what a seed does to both is then not mistaken for what separates them, as in a sweep that is not
    finished.
    """
    shared = [number for number in row.numbers if number in versus.numbers]
    if len(shared) == 1 < min(len(row.numbers), len(versus.numbers)):
        shared = []  # a single pair tells less than all others
    if shared:
        row, versus = (
            replace(r, seeds=[r.seeds[r.numbers.index(number)] for number in shared])
            for r in (row, versus)
        )
    documents = estimate(bins(row.mean), bins(versus.mean))
    ours, theirs = (_means(r, bins, len(documents)) for r in (row, versus))
    gaps = []
    for of_documents, a, b in zip(documents, ours.T, theirs.T, strict=True):
        half_width = paired_half_width(a - b) if shared else seed_half_width(a, b)
        both = widen(of_documents, half_width)
        gaps.append(_Gap(of_documents, min(len(a), len(b)), half_width, both))
    return gaps


def _means(row: ScoredModel, bins: Callable[[Sums], Sums], n_bins: int) -> np.ndarray:
    """(n_seeds, n_bins) mean losses, NaN in a bin without a token."""
    binned = [bins(sums) for sums in row.seeds]
    nats = np.array([sums.nats.sum(axis=0) for sums in binned])
    tokens = np.array([sums.tokens.sum(axis=0) for sums in binned])
    with np.errstate(invalid="ignore"):
        return with_bins(nats, n_bins) / with_bins(tokens, n_bins)


def _or_none(value: float) -> float | None:
    """None for NaN, which JSON does not have."""
    return None if math.isnan(value) else value


def _interval(of: Estimate) -> list[float | None]:
    """From low to high; None where too few documents tell of no others."""
    return [_or_none(of.low), _or_none(of.high)]


def _binned(rows: list[ScoredModel], bins: Callable[[Sums], Sums] = lambda sums: sums) -> Table:
    """Every model in every bin, next to the first."""
    return [cell for row in rows for cell in _by_bin(row, rows[0], bins)]


def _of_whole_bins(table: Table) -> Table:
    """Without differences in a bin that one of the two windows ends in: of other positions."""
    none = {"difference": None, "difference_interval": [None, None]}

    def is_whole(cell: dict[str, Any]) -> bool:
        histories = {table[0]["history"], cell["history"]}
        return len(histories) == 1 or 2 ** cell["bin"] <= min(histories)

    return [cell if is_whole(cell) else cell | none for cell in table]


def _by_bin(
    row: ScoredModel, versus: ScoredModel, bins: Callable[[Sums], Sums] = lambda sums: sums
) -> Table:
    """Mean loss in each bin with a token, and row - versus; None where versus has no token."""
    sums = bins(row.mean)
    counts = sums.tokens.sum(axis=0).tolist()
    cells = zip(counts, estimate(sums), _gaps(row, versus, bins), strict=True)
    return [
        {
            "label": row.label,
            "history": row.scoring.history,
            "bin": number,
            "range": bin_name(number),
            "tokens": count,
            "nats": mean.mean,
            "interval": _interval(mean),
            "difference": _or_none(gap.both.mean),
            "difference_interval": _interval(gap.both),
        }
        for number, (count, mean, gap) in enumerate(cells)
        if count
    ]

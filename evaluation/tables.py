"""From losses that are added up to the tables of an evaluation, as JSON can hold them.

Where windows slide, all rows are of identical tokens: those that every one of them shows nearly all
of its history (LEAST_SEEN). As the paper evaluates, windows that do not overlap leave out what does
not fill one, so that each row is of its own tokens; and a control is compared with nothing but
itself.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from evaluation.results import Row, without_nan
from evaluation.statistics import estimate, paired_half_width, seed_half_width, widen, with_bins
from evaluation.sums import Scored, Sums, Text, bin_name, kind_of, log_bins
from evaluation.windows import Scoring

Bins = Callable[[Sums], Sums]  # losses in other bins


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredModel:
    """One model, scored in one way."""

    label: str
    masked: bool  # whether documents were in training
    scoring: Scoring
    seeds: dict[int, Sums]  # by the number of the seed

    @property
    def mean(self) -> Sums:
        """The mean over the seeds, which all have the same tokens."""
        first, *_ = seeds = list(self.seeds.values())
        return replace(first, nats=np.mean([seed.nats for seed in seeds], axis=0))


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
    chunk, strided, control = (_rows(scored, kind) for kind in ("chunk", "sliding", "control"))
    as_trained, as_trained_chunk = _as_trained(strided), _as_trained(chunk)
    tables = {
        "data": {
            "name": text.name,
            "tokens": text.tokens,
            "documents": text.n_documents or len(text.document_lengths),
            **({"parts": len(text.document_lengths)} if text.n_documents else {}),
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
    return without_nan(tables)


def compare(scored: Sequence[Scored], pairs: Iterable[tuple[str, str]]) -> list[Row]:
    """Differences between the models of pairs of labels, of those pairs that are there.

    Returns:
        For each pair the difference in nats, as trained, with all of its history: chunk as the
        paper evaluates, strided on the tokens of `as_trained`; parts, of these the tokens at
        the start of a document, as far as the shortest context of all reaches (rounded up to a
        power of two), and the others; and document_position, in logarithmic bins.
    """
    shortest = min(s.config.model.context_length for s in scored)
    chunk, strided = (
        {row.label: row for row in _as_trained(_rows(scored, kind))}
        for kind in ("chunk", "sliding")
    )
    rows = [
        {
            "label": label,
            "to_label": other,
            "chunk": _difference(chunk[label], chunk[other]),
            "strided": _difference(strided[label], strided[other]),
            "parts": _parts(strided[label], strided[other], shortest),
            "document_position": _by_bin(strided[label], strided[other]),
        }
        for label, other in pairs
        if label in strided and other in strided
    ]
    return without_nan(rows)


def _rows(scored: Iterable[Scored], kind: str) -> list[ScoredModel]:
    """One row a model and scoring of a kind, in the order of the command line."""
    rows: dict[tuple[str, Scoring], ScoredModel] = {}
    for s in scored:
        for scoring, sums in s.sums.items():
            if kind_of(scoring) == kind:
                masked = s.about["document_mask"]
                new = ScoredModel(label=s.label, masked=masked, scoring=scoring, seeds={})
                rows.setdefault((s.label, scoring), new).seeds[s.number] = sums
    return list(rows.values())


def _as_trained(rows: list[ScoredModel]) -> list[ScoredModel]:
    """For each model the row with the longest history, at the smallest stride.

    Where a model was scored both ways, documents are masked if they were in training.
    """

    def fitness(row: ScoredModel) -> tuple[bool, int, int]:
        scoring = row.scoring
        return scoring.document_mask == row.masked, scoring.history, -scoring.stride

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


def _tabulate(row: ScoredModel, versus: ScoredModel | None) -> Row:
    """Loss, perplexity and bits per byte of a row, and its difference to another."""
    whole = _joined(row.mean)
    (mean,) = estimate(whole)
    return {
        "label": row.label,
        **asdict(row.scoring),
        "tokens": int(whole.tokens.sum()),
        "bytes": whole.n_bytes,
        "nats": mean.mean,
        "nats_interval": [mean.low, mean.high],
        "nats_of_seeds": [float(s.nats.sum() / s.tokens.sum()) for s in row.seeds.values()],
        "perplexity": math.exp(mean.mean),
        "bits_per_byte": float(whole.nats.sum()) / math.log(2) / whole.n_bytes,
        "difference": None if versus in (None, row) else _difference(row, versus),
    }


def _difference(row: ScoredModel, versus: ScoredModel) -> Row:
    """row - versus, nats, over the seeds that both have."""
    (gap,) = _gaps(row, versus, _joined)
    to = {"to_label": versus.label, "to_history": versus.scoring.history}
    return {**to, "tokens": int(row.mean.tokens.sum()), **gap}


def _parts(row: ScoredModel, versus: ScoredModel, shortest: int) -> list[Row]:
    """row - versus in the bins that begin before `shortest` tokens, and in the others."""
    n_bins = 1 + int(log_bins(shortest - 1))
    edge = 2 ** (n_bins - 1)

    def halves(sums: Sums) -> Sums:
        return _joined(sums, slice(n_bins), slice(n_bins, None))

    names = f"0 to {edge - 1:,}", f"{edge:,} and more"
    counts = halves(row.mean).tokens.sum(axis=0).tolist()
    return [
        {"range": name, "tokens": count, "nats": gap["nats"], "interval": gap["interval"]}
        for name, count, gap in zip(names, counts, _gaps(row, versus, halves), strict=True)
    ]


def _joined(sums: Sums, *bins: slice) -> Sums:
    """Bins joined to larger ones, by default to a single one."""
    nats, tokens = (
        np.stack([table[:, some].sum(axis=1) for some in bins or (slice(None),)], axis=1)
        for table in (sums.nats, sums.tokens)
    )
    return replace(sums, nats=nats, tokens=tokens)


def _by_length(sums: Sums, text: Text) -> Sums:
    """Bins by the length of the document."""
    bins, whole = log_bins(text.document_lengths)[:, None], _joined(sums)
    here = bins == np.arange(bins.max() + 1)
    return replace(sums, nats=whole.nats * here, tokens=whole.tokens * here)


def _gaps(row: ScoredModel, versus: ScoredModel, bins: Bins) -> list[Row]:
    """row - versus in each bin: nats, how sure they are, and how many seeds were compared.

    Where both have several of the same seeds, or one has a single one, of these alone, in pairs:
    what a seed does to both is then not mistaken for what separates them, as in a sweep that is not
    finished.
    """
    shared = [number for number in row.seeds if number in versus.seeds]
    if len(shared) == 1 < min(len(row.seeds), len(versus.seeds)):
        shared = []  # a single pair tells less than all others
    if shared:
        row, versus = (
            replace(r, seeds={number: r.seeds[number] for number in shared}) for r in (row, versus)
        )
    documents = estimate(bins(row.mean), bins(versus.mean))
    gaps = []
    ours, theirs = (_means(r, bins, len(documents)) for r in (row, versus))
    for of_documents, a, b in zip(documents, ours.T, theirs.T, strict=True):
        half_width = paired_half_width(a - b) if shared else seed_half_width(a, b)
        both = widen(of_documents, half_width)
        gaps.append(
            {
                "nats": both.mean,
                "interval": [both.low, both.high],
                "interval_of_documents": [of_documents.low, of_documents.high],
                "seeds": min(len(a), len(b)),  # of the model with fewer, where not in pairs
                "half_width_of_seeds": half_width,
            }
        )
    return gaps


def _means(row: ScoredModel, bins: Bins, n_bins: int) -> np.ndarray:
    """(n_seeds, n_bins) mean losses, NaN in a bin without a token."""
    binned = [bins(sums) for sums in row.seeds.values()]
    nats = np.array([sums.nats.sum(axis=0) for sums in binned])
    tokens = np.array([sums.tokens.sum(axis=0) for sums in binned])
    with np.errstate(invalid="ignore"):
        return with_bins(nats, n_bins) / with_bins(tokens, n_bins)


def _binned(rows: list[ScoredModel], bins: Bins = lambda sums: sums) -> list[Row]:
    """Every model in every bin, next to the first."""
    return [cell for row in rows for cell in _by_bin(row, rows[0], bins)]


def _of_whole_bins(table: list[Row]) -> list[Row]:
    """Without differences in a bin that one of the two windows ends in: of other positions."""
    for cell in table:
        histories = {table[0]["history"], cell["history"]}
        if len(histories) == 2 and 2 ** cell["bin"] > min(histories):
            cell |= {"difference": None, "difference_interval": [None, None]}
    return table


def _by_bin(row: ScoredModel, versus: ScoredModel, bins: Bins = lambda sums: sums) -> list[Row]:
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
            "interval": [mean.low, mean.high],
            "difference": gap["nats"],
            "difference_interval": gap["interval"],
        }
        for number, (count, mean, gap) in enumerate(cells)
        if count
    ]

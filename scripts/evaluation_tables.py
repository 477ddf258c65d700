"""From losses of single tokens to the tables of an evaluation, as JSON can hold them.

Every table compares on identical tokens: those that all of its rows have scored, each with nearly
all of its history (LEAST_SEEN). In two the rows' own tokens count, and differences are taken over
the tokens that two rows share: in "chunk", where the paper's evaluation leaves out what does not
fill a window, and in "control", where a model is compared with nothing but itself.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from data.shards import TokenStream
from data.windows import Scoring
from model.flops import count_params
from scripts.evaluation_statistics import (
    Corpus,
    Estimate,
    bin_name,
    describe_corpus,
    estimate,
    log_bins,
    paired_half_width,
    seed_half_width,
    widen,
)
from scripts.runs import Run
from training.environment import read_starts
from training.metrics import read_metrics

Table = list[dict[str, Any]]

LEAST_SEEN = Fraction(7, 8)
"""Of its history, for a token to count where windows slide. A window that slides by half of a short
context shows three quarters of it on average, but nearly all of a long one: the tokens at its start
would flatter the longer context, as the paper's windows do."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A run and what it was scored."""

    label: str
    """Of the model; runs that differ in their seed share it."""
    run: Run
    losses: dict[Scoring, np.ndarray]
    """(n_tokens,) nats each, NaN where not scored."""


@dataclass(frozen=True, kw_only=True)
class ScoredModel:
    """One model, scored in one way, over its seeds."""

    label: str
    scoring: Scoring
    seeds: list[np.ndarray]
    """(n_tokens,) losses of each seed."""
    numbers: list[int]
    """Of the seeds; each is there once."""

    @property
    def mean(self) -> np.ndarray:
        """(n_tokens,) losses, the mean over the seeds."""
        return np.mean(self.seeds, axis=0)


def tabulate(scored: Sequence[Scored], stream: TokenStream) -> dict[str, Any]:
    """All tables of an evaluation.

    Args:
        scored: the runs; differences are to the model of the first.
        stream: the validation split that they were scored on.

    Returns:
        data: what was scored. runs: what was trained, one entry a run. chunk, strided: lists of
        rows, each compared with the first model scored in the same way. control: the same, but
        compared with the same model and windows, their distant part intact. as_trained and
        as_trained_chunk: one row a model, with all of its history, documents masked if it was
        trained so. chunk_position, document_position, document_length: the mean loss of those in
        logarithmic bins, and its difference to the first model.
    """
    corpus = describe_corpus(stream, scored[0].run.tokenizer.token_bytes())
    rows = _rows(scored)
    chunk = [r for r in rows if r.scoring.first == 0 and r.scoring.control == "none"]
    control = [r for r in rows if r.scoring.control != "none"]
    strided = _well_seen(r for r in rows if r not in chunk and r not in control)
    as_trained = _common(_as_trained(strided, scored))
    as_trained_chunk = _as_trained(chunk, scored)
    binned = as_trained or _common(as_trained_chunk)
    return {
        "data": {
            "name": stream.path.resolve().name,
            "tokens": len(stream),
            "documents": corpus.n_documents,
            "text_bytes": stream.info.text_bytes,
        },
        "runs": [_describe(s) for s in scored],
        "chunk": [_tabulate(r, _same_way(chunk, r), corpus) for r in chunk],
        "strided": [_tabulate(r, _same_way(strided, r), corpus) for r in _common(strided)],
        "control": [_tabulate(r, _undisturbed(control, r), corpus) for r in control],
        "as_trained": [_tabulate(r, _first(as_trained, r), corpus) for r in as_trained],
        "as_trained_chunk": [
            _tabulate(r, _first(as_trained_chunk, r), corpus) for r in as_trained_chunk
        ],
        "chunk_position": _binned(_common(as_trained_chunk), corpus, _window_position),
        "document_position": _binned(binned, corpus, lambda _: corpus.history),
        "document_length": _binned(binned, corpus, lambda _: corpus.document_length),
    }


def compare(
    scored: Sequence[Scored], stream: TokenStream, pairs: Iterable[tuple[str, str]]
) -> Table:
    """What separates models that one wants to compare with another than the first.

    Args:
        scored, stream: as for `tabulate`.
        pairs: labels of a model and of what it is compared with; those that are not there are left
            out.

    Returns:
        For each pair the difference in nats, as trained, with all of its history: chunk as the
        paper evaluates, strided on the tokens of `as_trained`, and document_position, in
        logarithmic bins.
    """
    corpus = describe_corpus(stream, scored[0].run.tokenizer.token_bytes())
    rows = [r for r in _rows(scored) if r.scoring.control == "none"]
    chunk = {r.label: r for r in _as_trained([r for r in rows if r.scoring.first == 0], scored)}
    sliding = _well_seen(r for r in rows if r.scoring.first > 0)
    strided = _common(_as_trained(sliding, scored))
    strided = {r.label: r for r in strided}

    def by_position(label: str, other: str) -> Table:
        table = _binned([strided[other], strided[label]], corpus, lambda _: corpus.history)
        return [row for row in table if row["label"] == label]

    return [
        {
            "label": label,
            "to_label": other,
            "chunk": _difference(chunk[label], chunk[other], corpus),
            "strided": _difference(strided[label], strided[other], corpus),
            "document_position": by_position(label, other),
        }
        for label, other in pairs
        if label in strided and other in strided
    ]


def _rows(scored: Iterable[Scored]) -> list[ScoredModel]:
    """One row a model and scoring, in the order of the command line."""
    rows: dict[tuple[str, Scoring], ScoredModel] = {}
    for s in scored:
        for scoring, losses in s.losses.items():
            new = ScoredModel(label=s.label, scoring=scoring, seeds=[], numbers=[])
            row = rows.setdefault((s.label, scoring), new)
            row.seeds.append(losses)
            row.numbers.append(s.run.seed_number)
    return list(rows.values())


def _well_seen(rows: Iterable[ScoredModel]) -> list[ScoredModel]:
    """The rows with only those tokens that see LEAST_SEEN of the row's history."""
    return [
        _without(r, r.scoring.seen(len(r.seeds[0])) < LEAST_SEEN * r.scoring.history) for r in rows
    ]


def _common(rows: list[ScoredModel]) -> list[ScoredModel]:
    """The rows with only those tokens that all of them scored.

    Raises:
        ValueError: there are none.
    """
    if not rows:
        return []
    missing = np.any([np.isnan(r.seeds[0]) for r in rows], axis=0)
    if missing.all():
        ways = ", ".join(dict.fromkeys(r.scoring.name for r in rows))
        raise ValueError(
            f"of {ways} no token sees {LEAST_SEEN} of the history in each: take a single --stride, "
            "or a longer text"
        )
    return [_without(r, missing) for r in rows]


def _without(row: ScoredModel, tokens: np.ndarray) -> ScoredModel:
    """The row, where some of the tokens do not count: (n_tokens,) bool."""
    return replace(row, seeds=[np.where(tokens, np.nan, losses) for losses in row.seeds])


def _as_trained(rows: list[ScoredModel], scored: Sequence[Scored]) -> list[ScoredModel]:
    """For each model the row with the longest history, at the smallest stride.

    Where a model was scored both ways, documents are masked if they were in training.
    """
    masked = {s.label: s.run.config.data.document_mask for s in scored}

    def fitness(row: ScoredModel) -> tuple[bool, int, int]:
        scoring = row.scoring
        same = scoring.document_mask == masked[row.label]
        return same, scoring.history, -scoring.stride

    labels = dict.fromkeys(row.label for row in rows)
    return [max((r for r in rows if r.label == label), key=fitness) for label in labels]


def _first(rows: list[ScoredModel], row: ScoredModel) -> ScoredModel | None:
    return None if _is(rows[0], row) else rows[0]


def _same_way(rows: list[ScoredModel], row: ScoredModel) -> ScoredModel | None:
    """What `row` is compared with: the first model, scored in the same way at its longest."""
    same = [
        r
        for r in rows
        if r.label == rows[0].label
        and r.scoring.document_mask == row.scoring.document_mask
        and (r.scoring.stride == row.scoring.stride or row.scoring.first == 0)
    ]
    best = max(same, key=lambda r: r.scoring.history, default=None)
    return None if best is None or _is(best, row) else best


def _undisturbed(rows: list[ScoredModel], row: ScoredModel) -> ScoredModel | None:
    """What a control is compared with: the same model and windows, their distant part intact."""
    if row.scoring.control == "intact":
        return None
    intact = replace(row.scoring, control="intact")
    return next((r for r in rows if (r.label, r.scoring) == (row.label, intact)), None)


def _is(a: ScoredModel, b: ScoredModel) -> bool:
    return (a.label, a.scoring) == (b.label, b.scoring)


def _tabulate(row: ScoredModel, versus: ScoredModel | None, corpus: Corpus) -> dict[str, Any]:
    """Loss, perplexity and bits per byte of a row, and its difference to another."""
    losses = row.mean
    counted = ~np.isnan(losses)
    (mean,) = estimate(losses, corpus)
    n_bytes = int(corpus.n_bytes[counted].sum())
    nats = float(losses[counted].sum(dtype=np.float64))
    return {
        "label": row.label,
        **asdict(row.scoring),
        "tokens": int(counted.sum()),
        "bytes": n_bytes,
        "nats": mean.mean,
        "nats_interval": _interval(mean),
        "nats_of_seeds": [float(np.nanmean(s, dtype=np.float64)) for s in row.seeds],
        "perplexity": math.exp(mean.mean),
        "bits_per_byte": nats / math.log(2) / n_bytes,
        "difference": None if versus is None else _difference(row, versus, corpus),
    }


def _difference(row: ScoredModel, versus: ScoredModel, corpus: Corpus) -> dict[str, Any]:
    """row - versus, nats, over the tokens that both scored and the seeds that both have."""
    (gap,) = _gaps(row, versus, corpus)
    return {
        "to_label": versus.label,
        "to_history": versus.scoring.history,
        "tokens": int((~np.isnan(row.mean - versus.mean)).sum()),
        "nats": gap.both.mean,
        "interval": _interval(gap.both),
        "interval_of_documents": _interval(gap.documents),
        "seeds": gap.seeds,
        "half_width_of_seeds": gap.half_width_of_seeds,
    }


class _Gap(NamedTuple):
    """What separates two models, and how sure that is."""

    documents: Estimate
    seeds: int
    """That both have; of the model with fewer, where not in pairs."""
    half_width_of_seeds: float | None
    both: Estimate


def _gaps(
    row: ScoredModel, versus: ScoredModel, corpus: Corpus, bins: np.ndarray | None = None
) -> list[_Gap]:
    """row - versus in each bin, over the tokens that both scored.

    Where both have several of the same seeds, or one has a single one, of these alone, in pairs:
    what a seed does to both is then not mistaken for what separates them, as in a sweep that is not
    finished.
    """
    shared = [number for number in row.numbers if number in versus.numbers]
    if len(shared) == 1 < min(len(row.numbers), len(versus.numbers)):
        shared = []  # a single pair tells less than all others
    if shared:
        row, versus = _of_seeds(row, shared), _of_seeds(versus, shared)
    per_token = row.mean - versus.mean
    documents = estimate(per_token, corpus, bins=bins)
    scored = ~np.isnan(per_token)
    places = np.zeros(int(scored.sum()), dtype=np.int64) if bins is None else bins[scored]
    counts = np.bincount(places, minlength=len(documents))

    def means(of: ScoredModel) -> list[np.ndarray]:
        with np.errstate(invalid="ignore"):  # 0 / 0 where a bin has no token
            return [
                np.bincount(places, weights=losses[scored], minlength=len(counts)) / counts
                for losses in of.seeds
            ]

    ours, theirs = means(row), means(versus)
    gaps = []
    for number, of_documents in enumerate(documents):
        a, b = [float(m[number]) for m in theirs], [float(m[number]) for m in ours]
        if row.label == versus.label:
            half_width = None  # the same weights scored twice: documents say it all
        elif shared:
            half_width = paired_half_width([y - x for x, y in zip(a, b, strict=True)])
        else:
            half_width = seed_half_width(a, b)
        both = widen(of_documents, half_width)
        gaps.append(_Gap(of_documents, min(len(a), len(b)), half_width, both))
    return gaps


def _of_seeds(row: ScoredModel, numbers: list[int]) -> ScoredModel:
    """The same with some of its seeds, in the order of `numbers`."""
    seeds = [row.seeds[row.numbers.index(number)] for number in numbers]
    return replace(row, seeds=seeds, numbers=numbers)


def _interval(of: Estimate) -> list[float | None]:
    """From low to high; None, as JSON has no NaN, where too few documents tell of no others."""
    return [None if math.isnan(end) else end for end in (of.low, of.high)]


def _window_position(row: ScoredModel) -> np.ndarray:
    """Where in its chunk the token stands, from 0, of which each target is the next."""
    positions = np.arange(len(row.seeds[0]))
    return (positions - 1) % row.scoring.history


def _binned(rows: list[ScoredModel], corpus: Corpus, lengths: Any) -> Table:
    """Mean loss of each model by bins of `lengths(row)`, and what separates it from the first."""
    if not rows:
        return []
    first = rows[0]
    table = []
    for row in rows:
        bins = log_bins(np.asarray(lengths(row)))
        means = estimate(row.mean, corpus, bins=bins)
        gaps = _gaps(row, first, corpus, bins)
        counts = np.bincount(bins[~np.isnan(row.mean)], minlength=len(means))
        for number, count in enumerate(counts):
            if count:
                table.append(
                    {
                        "label": row.label,
                        "history": row.scoring.history,
                        "bin": number,
                        "range": bin_name(number),
                        "tokens": int(count),
                        "nats": means[number].mean,
                        "interval": _interval(means[number]),
                        "difference": gaps[number].both.mean,
                        "difference_interval": _interval(gaps[number].both),
                    }
                )
    return table


def _describe(scored: Scored) -> dict[str, Any]:
    """What was trained, and what it took."""
    run = scored.run
    config = run.config
    speeds = [r["tokens_per_s"] for r in read_metrics(run.folder) if "tokens_per_s" in r]
    return {
        "label": scored.label,
        "folder": run.folder.resolve().name,
        "seed": config.run.seed,
        "context_length": config.model.context_length,
        "positions": config.model.positions,
        "mask": config.model.mask.pattern,
        "document_mask": config.data.document_mask,
        "parameters_without_positions": count_params(config.model),
        "step": run.progress.step,
        "tokens": run.progress.tokens,
        "gpu_hours": run.progress.gpu_hours,
        "tokens_per_s": median(speeds) if speeds else None,
        "starts": read_starts(run.folder),
    }

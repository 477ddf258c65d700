"""From losses of single tokens to the tables of an evaluation, as JSON can hold them.

Every table compares on identical tokens: those that all of its rows have scored. In two the rows'
own tokens count, and differences are taken over the tokens that two rows share: in "chunk", where
the paper's evaluation leaves out what does not fill a window, and in "control", where a model is
compared with nothing but itself.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

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
    seed_half_width,
    widen,
)
from scripts.runs import Run
from training.environment import read_environment
from training.metrics import read_metrics

Table = list[dict[str, Any]]


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
    strided = [r for r in rows if r not in chunk and r not in control]
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


def _rows(scored: Iterable[Scored]) -> list[ScoredModel]:
    """One row a model and scoring, in the order of the command line."""
    seeds: dict[tuple[str, Scoring], list[np.ndarray]] = {}
    for s in scored:
        for scoring, losses in s.losses.items():
            seeds.setdefault((s.label, scoring), []).append(losses)
    return [
        ScoredModel(label=label, scoring=scoring, seeds=losses)
        for (label, scoring), losses in seeds.items()
    ]


def _common(rows: list[ScoredModel]) -> list[ScoredModel]:
    """The rows with only those tokens that all of them scored."""
    if not rows:
        return []
    missing = np.any([np.isnan(r.seeds[0]) for r in rows], axis=0)
    return [
        ScoredModel(
            label=r.label,
            scoring=r.scoring,
            seeds=[np.where(missing, np.nan, losses) for losses in r.seeds],
        )
        for r in rows
    ]


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
    """row - versus, nats, over the tokens that both scored."""
    per_token = row.mean - versus.mean
    (documents,) = estimate(per_token, corpus)
    shared = ~np.isnan(per_token)
    means = [[float(s[shared].mean(dtype=np.float64)) for s in r.seeds] for r in (versus, row)]
    # A control is the same weights scored twice: its seeds are paired, and documents say it all.
    seeds = None if row.label == versus.label else seed_half_width(*means)
    both = widen(documents, seeds)
    return {
        "to_label": versus.label,
        "to_history": versus.scoring.history,
        "tokens": int(shared.sum()),
        "nats": both.mean,
        "interval": _interval(both),
        "interval_of_documents": _interval(documents),
        "half_width_of_seeds": seeds,
    }


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
        gaps = estimate(row.mean - first.mean, corpus, bins=bins)
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
                        "difference": gaps[number].mean,
                        "difference_interval": _interval(gaps[number]),
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
        "environment": read_environment(run.folder),
    }

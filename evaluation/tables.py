"""Tables of an evaluation in JSON types, computed from summed losses.

With sliding windows, all rows are over the same tokens: those that see nearly the full history in
every row (MIN_HISTORY_SHARE). Chunks, as the paper evaluates, omit the tokens that do not fill a
window, so each row has its own tokens. Controls are compared only with their own model and windows.
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

Bins = Callable[[Sums], Sums]  # maps losses to other bins


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredModel:
    """One model and one scoring."""

    label: str
    masked: bool  # whether documents were masked in training
    scoring: Scoring
    seeds: dict[int, Sums]  # by seed number

    @property
    def mean(self) -> Sums:
        """Mean over the seeds, which all score the same tokens."""
        first, *_ = seeds = list(self.seeds.values())
        return replace(first, nats=np.mean([seed.nats for seed in seeds], axis=0))


def tabulate(scored: Sequence[Scored], text: Text) -> dict[str, Any]:
    """Compute all tables of an evaluation of runs on a text.

    Returns:
        data: the text that was scored.
        runs: settings and cost, one entry per run.
        chunk, strided: rows, each compared with the first model under the same document mask. Rows
            of strided are also compared with the longest history of their own model.
        control: rows, each compared with the same model and windows with the distant part intact.
        as_trained, as_trained_chunk: one row per model, with its full history and with documents
            masked as in training.
        key_tokens: who chose the key tokens, how many there are, and the runs that were not scored
            on them; None if no run was.
        key, as_trained_key: as strided and as_trained, on key tokens. Perplexity is LongPPL.
        chunk_position, document_position, document_length: mean losses of these rows in
            logarithmic bins, and differences to the first model.
    """
    chunk, strided, control = (_rows(scored, kind) for kind in ("chunk", "sliding", "control"))
    as_trained, as_trained_chunk = _as_trained(strided), _as_trained(chunk)
    key_tokens = _key_tokens(scored)
    key = _rows(scored, "key") if key_tokens and key_tokens["tokens"] else []
    as_trained_key = _as_trained(key)
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
        "chunk": [_tabulate(r, _reference(chunk, r, chunk[0].label)) for r in chunk],
        "strided": _by_history(strided),
        "control": [_tabulate(r, _intact(control, r)) for r in control],
        "as_trained": [_tabulate(r, as_trained[0]) for r in as_trained],
        "as_trained_chunk": [_tabulate(r, as_trained_chunk[0]) for r in as_trained_chunk],
        "key_tokens": key_tokens,
        "key": _by_history(key),
        "as_trained_key": [_tabulate(r, as_trained_key[0]) for r in as_trained_key],
        "chunk_position": _drop_partial_bins(_binned(as_trained_chunk)),
        "document_position": _binned(as_trained),
        "document_length": _binned(as_trained, lambda sums: _by_length(sums, text)),
    }
    return without_nan(tables)


def compare(scored: Sequence[Scored], pairs: Iterable[tuple[str, str]]) -> list[Row]:
    """Compute differences between pairs of models. Pairs with a missing label are skipped.

    Returns:
        One row per pair, with differences in nats between the models as trained, with their full
        history.
        chunk: as the paper evaluates.
        strided: on the tokens of `as_trained`.
        key: on the key tokens; None if a model was not scored on them.
        parts: the tokens of strided in two parts. The first contains the starts of documents, up
            to the shortest context of all runs (rounded up to a power of two).
        document_position: the tokens of strided in logarithmic bins.
    """
    shortest = min(s.config.model.context_length for s in scored)
    chunk, strided, key = (
        {row.label: row for row in _as_trained(_rows(scored, kind))}
        for kind in ("chunk", "sliding", "key")
    )
    key_tokens = _key_tokens(scored) or {"tokens": 0}
    rows = [
        {
            "label": label,
            "to_label": other,
            "chunk": _difference(chunk[label], chunk[other]),
            "strided": _difference(strided[label], strided[other]),
            "key": _difference(key[label], key[other])
            if key_tokens["tokens"] and label in key and other in key
            else None,
            "parts": _parts(strided[label], strided[other], shortest),
            "document_position": _by_bin(strided[label], strided[other]),
        }
        for label, other in pairs
        if label in strided and other in strided
    ]
    return without_nan(rows)


def _key_tokens(scored: Sequence[Scored]) -> Row | None:
    """Key tokens on which runs were scored, and the folders of those that were not.

    None if no run was scored on key tokens.

    Raises:
        ValueError: runs were scored on different key tokens.
    """
    about = {s.key.about["sha256"]: s.key.about for s in scored if s.key}
    if len(about) > 1:
        choosers = ", ".join(f"{a['chooser']} ({a['sha256'][:12]})" for a in about.values())
        raise ValueError(
            f"all runs must be scored on the same key tokens, but theirs were chosen by {choosers}."
            " Score them again with one --key-tokens FILE"
        )
    for one in about.values():
        return {**one, "missing": [s.about["folder"] for s in scored if s.key is None]}
    return None


def _rows(scored: Iterable[Scored], kind: str) -> list[ScoredModel]:
    """One row per model and scoring of a kind, in the order of the command line.

    Kinds are those of `kind_of`, and key: sliding windows on the key tokens.
    """
    rows: dict[tuple[str, Scoring], ScoredModel] = {}
    for s in scored:
        on_key = s.key.sums if s.key else {}
        for scoring, sums in (on_key if kind == "key" else s.sums).items():
            if kind in ("key", kind_of(scoring)):
                masked = s.about["document_mask"]
                new = ScoredModel(label=s.label, masked=masked, scoring=scoring, seeds={})
                rows.setdefault((s.label, scoring), new).seeds[s.number] = sums
    return list(rows.values())


def _as_trained(rows: list[ScoredModel]) -> list[ScoredModel]:
    """For each model, the row with the longest history and the smallest stride.

    If a model was scored with and without document masks, the row is the one that matches training.
    """

    def priority(row: ScoredModel) -> tuple[bool, int, int]:
        scoring = row.scoring
        return scoring.document_mask == row.masked, scoring.history, -scoring.stride

    labels = dict.fromkeys(row.label for row in rows)
    return [max((r for r in rows if r.label == label), key=priority) for label in labels]


def _by_history(rows: list[ScoredModel]) -> list[Row]:
    """Rows of sliding windows: the difference to the first model, and to the longest history."""
    return [
        {
            **_tabulate(row, _reference(rows, row, rows[0].label)),
            "longest_difference": _difference(row, _reference(rows, row, row.label)),
        }
        for row in rows
    ]


def _reference(rows: list[ScoredModel], row: ScoredModel, label: str) -> ScoredModel | None:
    """Longest history of a model with the mask of `row`, at its stride if available."""
    stride, masked = row.scoring.stride, row.scoring.document_mask

    def priority(r: ScoredModel) -> tuple[int, bool, int]:
        return r.scoring.history, r.scoring.stride == stride, -r.scoring.stride

    candidates = (r for r in rows if r.label == label and r.scoring.document_mask == masked)
    return max(candidates, key=priority, default=None)


def _intact(rows: list[ScoredModel], row: ScoredModel) -> ScoredModel | None:
    """Row with the model and windows of a control, but with the distant part intact."""
    intact = replace(row.scoring, control="intact")
    return next((r for r in rows if (r.label, r.scoring) == (row.label, intact)), None)


def _tabulate(row: ScoredModel, versus: ScoredModel | None) -> Row:
    """Loss, perplexity and bits per byte of a row, and its difference to another."""
    total = _merge_bins(row.mean)
    (mean,) = estimate(total)
    return {
        "label": row.label,
        **asdict(row.scoring),
        "tokens": int(total.tokens.sum()),
        "bytes": total.n_bytes,
        "nats": mean.mean,
        "nats_interval": [mean.low, mean.high],
        "nats_of_seeds": [float(s.nats.sum() / s.tokens.sum()) for s in row.seeds.values()],
        "perplexity": math.exp(mean.mean),
        # key tokens may all be ends of texts, which encode nothing
        "bits_per_byte": float(total.nats.sum()) / math.log(2) / (total.n_bytes or math.nan),
        "difference": _difference(row, versus),
    }


def _difference(row: ScoredModel, versus: ScoredModel | None) -> Row | None:
    """Difference row - versus in nats, over the seeds that both have. None to itself or None."""
    if versus in (None, row):
        return None
    (difference,) = _differences(row, versus, _merge_bins)
    reference = {"to_label": versus.label, "to_history": versus.scoring.history}
    return {**reference, "tokens": int(row.mean.tokens.sum()), **difference}


def _parts(row: ScoredModel, versus: ScoredModel, shortest: int) -> list[Row]:
    """Difference row - versus in the bins that begin before `shortest` tokens, and in the rest."""
    n_bins = 1 + int(log_bins(shortest - 1))
    edge = 2 ** (n_bins - 1)

    def halves(sums: Sums) -> Sums:
        return _merge_bins(sums, slice(n_bins), slice(n_bins, None))

    names = f"0 to {edge - 1:,}", f"{edge:,} and more"
    counts = halves(row.mean).tokens.sum(axis=0).tolist()
    return [
        {"range": name, "tokens": count, "nats": part["nats"], "interval": part["interval"]}
        for name, count, part in zip(names, counts, _differences(row, versus, halves), strict=True)
    ]


def _merge_bins(sums: Sums, *ranges: slice) -> Sums:
    """Merge each range of bins into one. Without ranges, merge all."""
    nats, tokens = (
        np.stack([table[:, part].sum(axis=1) for part in ranges or (slice(None),)], axis=1)
        for table in (sums.nats, sums.tokens)
    )
    return replace(sums, nats=nats, tokens=tokens)


def _by_length(sums: Sums, text: Text) -> Sums:
    """Losses binned by document length."""
    bins, total = log_bins(text.document_lengths)[:, None], _merge_bins(sums)
    in_bin = bins == np.arange(bins.max() + 1)
    return replace(sums, nats=total.nats * in_bin, tokens=total.tokens * in_bin)


def _differences(row: ScoredModel, versus: ScoredModel, bins: Bins) -> list[Row]:
    """Difference row - versus in each bin, nats, with its intervals and the number of seeds.

    Seeds that both models have are compared in pairs, and all others are ignored. The effect of a
    seed on both models is then not mistaken for a difference, for example in an unfinished sweep.
    All seeds are compared, unpaired, if no seed is shared, or only one although both have several.
    """
    shared = [number for number in row.seeds if number in versus.seeds]
    if len(shared) == 1 < min(len(row.seeds), len(versus.seeds)):
        shared = []  # a single pair is less precise than all seeds unpaired
    if shared:
        row, versus = (
            replace(r, seeds={number: r.seeds[number] for number in shared}) for r in (row, versus)
        )
    documents = estimate(bins(row.mean), bins(versus.mean))
    differences = []
    row_means, versus_means = (_means(r, bins, len(documents)) for r in (row, versus))
    for over_documents, a, b in zip(documents, row_means.T, versus_means.T, strict=True):
        half_width = paired_half_width(a - b) if shared else seed_half_width(a, b)
        both = widen(over_documents, half_width)
        differences.append(
            {
                "nats": both.mean,
                "interval": [both.low, both.high],
                "interval_of_documents": [over_documents.low, over_documents.high],
                "seeds": min(len(a), len(b)),  # they differ only without pairs
                "half_width_of_seeds": half_width,
            }
        )
    return differences


def _means(row: ScoredModel, bins: Bins, n_bins: int) -> np.ndarray:
    """(n_seeds, n_bins) mean losses, NaN for empty bins."""
    binned = [bins(sums) for sums in row.seeds.values()]
    nats = np.array([sums.nats.sum(axis=0) for sums in binned])
    tokens = np.array([sums.tokens.sum(axis=0) for sums in binned])
    with np.errstate(invalid="ignore"):
        return with_bins(nats, n_bins) / with_bins(tokens, n_bins)


def _binned(rows: list[ScoredModel], bins: Bins = lambda sums: sums) -> list[Row]:
    """Losses of every model in every bin, with differences to the first."""
    return [cell for row in rows for cell in _by_bin(row, rows[0], bins)]


def _drop_partial_bins(table: list[Row]) -> list[Row]:
    """Remove differences in bins where one of the two windows ends, as their positions differ."""
    for cell in table:
        histories = {table[0]["history"], cell["history"]}
        if len(histories) == 2 and 2 ** cell["bin"] > min(histories):
            cell |= {"difference": None, "difference_interval": [None, None]}
    return table


def _by_bin(row: ScoredModel, versus: ScoredModel, bins: Bins = lambda sums: sums) -> list[Row]:
    """Mean loss in each non-empty bin, and row - versus, which is None if versus has no token."""
    sums = bins(row.mean)
    counts = sums.tokens.sum(axis=0).tolist()
    cells = zip(counts, estimate(sums), _differences(row, versus, bins), strict=True)
    return [
        {
            "label": row.label,
            "history": row.scoring.history,
            "bin": number,
            "range": bin_name(number),
            "tokens": count,
            "nats": mean.mean,
            "interval": [mean.low, mean.high],
            "difference": difference["nats"],
            "difference_interval": difference["interval"],
        }
        for number, (count, mean, difference) in enumerate(cells)
        if count
    ]

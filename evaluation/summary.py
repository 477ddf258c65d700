"""Summary of an evaluation: the first table of its report, with a verdict for each model."""

import math
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from evaluation.markdown import dict_table, difference_cell, digits, is_known
from evaluation.results import Row, cost_before, on_own_gpu
from evaluation.statistics import MIN_DOCUMENTS
from evaluation.sums import MIN_HISTORY_SHARE

_NO_KEY_TOKENS = (
    "not computed, as no run chose key tokens. Pass another seed of a model with the longest "
    "context (--key-tokens RUN), or several seeds of every model, so that one is not compared."
)


def summary(result: dict[str, Any]) -> list[str]:
    """Table with a row and a verdict for each model, and an explanation of the columns."""
    chunk, same, key = (
        {row["label"]: row for row in result.get(table, [])}  # old results have no key tokens
        for table in ("as_trained_chunk", "as_trained", "as_trained_key")
    )
    models = models_of(result["runs"])
    first, *others = models
    # models are compared with the first: on identical tokens if it was scored so, or else in chunks
    tables = [rows for rows in (same, chunk) if first in rows]
    scored = {n: next((rows[n] for rows in tables if n in rows), None) for n in models}
    masked = any(row and row["document_mask"] for row in scored.values())
    shorter = any(row and row["history"] != models[n]["context"] for n, row in scored.items())

    def line(label: str) -> dict[str, str]:
        model, row = models[label], scored[label]
        cells = {"model": label, "context": f"{model['context']:,}"}
        if shorter:
            cells["history"] = f"{row['history']:,}" if row else "-"
        if masked:
            cells["documents"] = documents_of(row) if row else "-"
        cells["training tokens"] = digits(model["tokens"], ",.0f")
        cells["perplexity, as the paper evaluates"] = _perplexity(chunk.get(label))
        cells["perplexity, on identical tokens"] = _perplexity(same.get(label))
        if key:
            cells["LongPPL"] = _perplexity(key.get(label))
        if others:
            difference = row["difference"] if row else None
            cells[f"difference to {first}, nats"] = difference_cell(difference)
            cells["verdict"] = _verdict(difference) if difference else "-"
        return cells

    parts = [*unfinished(result["runs"]), dict_table(map(line, models)).rstrip()]
    differences = {
        label: row["difference"] for label, row in scored.items() if row and row["difference"]
    }
    if differences:
        explanation = _explanation(differences, same if first in same else {})
        parts.append(f"{explanation} {cut_into_parts(result['data'])}".rstrip())
    if key:
        parts.append(f"LongPPL: perplexity on key tokens. {key_sentence(result['key_tokens'])}")
    elif reason := _why_no_long_ppl(result):
        parts.append(f"LongPPL: {reason}")
    return parts


def _why_no_long_ppl(result: dict[str, Any]) -> str | None:
    """Reason why a result with identical tokens has no LongPPL, and the remedy; None otherwise."""
    if "key_tokens" not in result or not result["strided"] or result["key"]:
        return None  # old results have no key tokens
    if (key := result["key_tokens"]) is None:
        return _NO_KEY_TOKENS
    return (
        f"not computed, as there are no key tokens. {key_sentence(key)} Choose them with a shorter "
        "--near, or by a run that was trained longer."
    )


def key_sentence(key: Row) -> str:
    """Sentence on the key tokens of a text: their share, who chose them, and how."""
    share = 100 * key["tokens"] / max(1, key["of_tokens"])
    return (
        f"{key['tokens']:,} of {key['of_tokens']:,} tokens ({share:.2g}%) are key tokens: those "
        f"whose loss falls by more than {key['min_gain']:g} nats, to less than "
        f"{key['max_loss']:g}, if {key['chooser']} sees {key['long']:,} instead of "
        f"{key['short']:,} tokens before them."
    )


def cut_into_parts(data: Row) -> str:
    """Sentence (and a space) for a text whose intervals are over parts of few documents, or ""."""
    if "parts" not in data:
        return ""
    return (
        f"The text has few documents and is cut into {data['parts']} parts: intervals over parts "
        "say how sure a result is on this text, not on others. "
    )


def _explanation(differences: dict[str, Row], same: dict[str, Row]) -> str:
    """Explain the differences in a summary, by label. `same` are the rows on identical tokens."""
    sentences = ["Better or worse: the 95% interval, in brackets, excludes zero."]
    if any(label in same for label in differences):
        tokens = next(iter(same.values()))["tokens"]
        sentences.append(
            f"Identical tokens: the same {tokens:,} for all models, each with at least "
            f"{MIN_HISTORY_SHARE} of the model's history before it."
        )
    in_chunks = [label for label in differences if label not in same]
    if in_chunks:
        sentences.append(
            "Compared as the paper evaluates, which favours longer contexts: "
            f"{', '.join(in_chunks)}."
        )
    if not all(is_known(*difference["interval"]) for difference in differences.values()):
        sentences.append(
            f"No interval, and so no verdict, where fewer than {MIN_DOCUMENTS} documents count: "
            "score a text of more."
        )
    single = [label for label, difference in differences.items() if difference["seeds"] == 1]
    if single:
        of = "" if len(single) == len(differences) else f" of {', '.join(single)}"
        sentences.append(f"One seed only: the intervals{of} cover documents but not seeds.")
    return " ".join(sentences)


def _perplexity(row: Row | None) -> str:
    return digits(row["perplexity"], ".2f") if row else "-"


def models_of(runs: list[Row]) -> dict[str, Row]:
    """Settings and mean training cost of each model by label, including the run it began with.

    Times are those of the seeds whose GPU was their own, and NaN without one.
    """
    total = [run | {name: run[name] + c for name, c in cost_before(run).items()} for run in runs]
    models = {}
    for label in dict.fromkeys(run["label"] for run in total):
        seeds = [run for run in total if run["label"] == label]
        timed = on_own_gpu(seeds)
        models[label] = {
            "seeds": len(seeds),
            "context": seeds[0]["context_length"],
            **{name: seeds[0][name] for name in ("positions", "mask", "document_mask")},
            "tokens": mean(run["tokens"] for run in seeds),
            **{name: _mean([run[name] for run in timed]) for name in ("tokens_per_s", "gpu_hours")},
        }
    return models


def _mean(values: Sequence[float | None]) -> float:
    """Mean, or NaN if one is unknown or there are none."""
    return mean(math.nan if value is None else value for value in values) if values else math.nan


def unfinished(runs: Iterable[Row]) -> list[str]:
    """Sentence that lists models that were not trained to the end, if any.

    Args:
        runs: label, step and max_steps of each.
    """
    # step 0 means imported weights, which were not trained here
    early = [
        f"{run['label']} (step {run['step']:,} of {run['max_steps']:,})"
        for run in runs
        if 0 < run["step"] < run.get("max_steps", 0)  # missing in old results
    ]
    names = ", ".join(dict.fromkeys(early))
    return [f"Not trained to the end: {names}."] if early else []


def _verdict(difference: Row) -> str:
    """Verdict in the summary: better, worse, or neither."""
    if not is_known(*difference["interval"]):
        return "no interval"
    if not is_shown(difference):
        return "no difference shown"
    return "better" if difference["nats"] < 0 else "worse"


def is_shown(difference: Row) -> bool:
    """Whether the interval is known and excludes zero."""
    low, high = difference["interval"]
    return is_known(low, high) and (low > 0 or high < 0)


def documents_of(row: Any) -> str:
    """How documents were treated in training or scoring: "masked" or "packed"."""
    return "masked" if row["document_mask"] else "packed"

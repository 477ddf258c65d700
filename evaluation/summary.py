"""The first table of an evaluation's report: a row and a verdict for each model."""

from typing import Any

import pandas as pd

from evaluation.markdown import dict_table, digits, is_known, with_interval
from evaluation.results import Row, cost_before
from evaluation.statistics import LEAST_DOCUMENTS
from evaluation.sums import LEAST_SEEN


def summary(result: dict[str, Any]) -> list[str]:
    """A row for each model with its verdict, and what the columns mean."""
    chunk, same = (
        {row["label"]: row for row in result[table]} for table in ("as_trained_chunk", "as_trained")
    )
    models = models_of(result["runs"])
    first, *others = models
    # as others are compared, which is with the first model: on identical tokens, if they can be
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
        if others:
            gap = row["difference"] if row else None
            number = with_interval(gap["nats"], gap["interval"]) if gap else "-"
            cells[f"difference to {first}, nats"] = number
            cells["verdict"] = _word(gap) if gap else "-"
        return cells

    parts = [*_unfinished(result["runs"]), dict_table(map(line, models)).rstrip()]
    gaps = {label: row["difference"] for label, row in scored.items() if row and row["difference"]}
    if gaps:
        compared = _how_compared(gaps, same if first in same else {})
        parts.append(f"{compared} {cut_into_parts(result['data'])}".rstrip())
    return parts


def cut_into_parts(data: Row) -> str:
    """A sentence, and a space, where the intervals of a text are over parts of few documents."""
    if "parts" not in data:
        return ""
    return (
        f"The text has few documents and is cut into {data['parts']} parts: intervals over parts "
        "say how sure a result is on this text, not on others. "
    )


def _how_compared(gaps: dict[str, Row], same: dict[str, Row]) -> str:
    """What the differences of a summary are, by label; `same` are those on identical tokens."""
    sentences = ["Better or worse: the 95% interval of the difference, in brackets, has no zero."]
    if any(label in same for label in gaps):
        tokens = next(iter(same.values()))["tokens"]
        sentences.append(
            f"Identical tokens: the same {tokens:,} for all, each with at least "
            f"{LEAST_SEEN} of the model's history before it."
        )
    flattered = [label for label in gaps if label not in same]
    if flattered:
        sentences.append(
            "Compared as the paper evaluates, which flatters the longer context: "
            f"{', '.join(flattered)}."
        )
    if not all(is_known(*gap["interval"]) for gap in gaps.values()):
        sentences.append(
            f"No interval, and so no verdict, where fewer than {LEAST_DOCUMENTS} documents count: "
            "score a text of more."
        )
    single = [label for label, gap in gaps.items() if gap["seeds"] == 1]
    if single:
        names = "all" if len(single) == len(gaps) else ", ".join(single)
        sentences.append(f"Compared over one seed, by intervals over documents alone: {names}.")
    return " ".join(sentences)


def _perplexity(row: Row | None) -> str:
    return digits(row["perplexity"], ".2f") if row else "-"


def models_of(runs: list[Row]) -> dict[str, Row]:
    """By label, how a model was trained: the means over its seeds, and what it began with, too."""
    costs = ["tokens", "tokens_per_s", "gpu_hours"]
    whole = [run | {name: run[name] + c for name, c in cost_before(run).items()} for run in runs]
    models = {}
    for label, seeds in pd.DataFrame(whole).groupby("label", sort=False):
        first, mean = seeds.iloc[0], seeds[costs].astype(float).mean(skipna=False).to_dict()
        about = {name: first[name] for name in ("positions", "mask", "document_mask")}
        size = {"seeds": len(seeds), "context": int(first["context_length"])}
        models[str(label)] = {**size, **about, **mean}
    return models


def _unfinished(runs: list[Row]) -> list[str]:
    """A sentence on models whose training had not come to its end, if there are any."""
    # a step of 0: imported weights, which were not trained here
    early = [
        f"{run['label']} (step {run['step']:,} of {run['max_steps']:,})"
        for run in runs
        if 0 < run["step"] < run.get("max_steps", 0)  # which early results do not tell
    ]
    return [f"Not trained to the end: {', '.join(dict.fromkeys(early))}."] if early else []


def _word(difference: Row) -> str:
    """The verdict of a summary."""
    if not is_known(*difference["interval"]):
        return "no interval"
    if not is_shown(difference):
        return "no difference shown"
    return "better" if difference["nats"] < 0 else "worse"


def is_shown(difference: Row) -> bool:
    """Whether the interval leaves out zero."""
    low, high = difference["interval"]
    return is_known(low, high) and (low > 0 or high < 0)


def documents_of(row: Any) -> str:
    """How a model was trained or scored."""
    return "masked" if row["document_mask"] else "packed"

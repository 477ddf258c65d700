"""Table 4 of the paper and ours, with the cost of training, as JSON, Markdown and a picture.

python -m experiments.table4.report out/table4_minutes/table4.json    # rewrite Markdown and picture
"""

from evaluation.markdown import dict_table
from experiments.reports import report_command

command = report_command(__name__)  # before PyTorch is imported, which takes seconds

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from evaluation.markdown import difference_cell, digits, escaped, is_known, markdown_table
from evaluation.pictures import differences_by_bin
from evaluation.report import trained_on
from evaluation.results import COST, Row, cost_before, on_own_gpu, read_result, write_result
from evaluation.style import COLOURS, name_ends, save, styles_of
from evaluation.summary import key_sentence
from experiments.harness import Result
from experiments.reports import publish, tokens_text
from experiments.table4.questions import PAIRS, QUESTION_OF, by_pair

PAPER = [
    {"model": "Megatron-LM, 1K", "perplexity": 18.2, "days_on_8_a100": 4.7},
    {"model": "FlashAttention, 1K", "perplexity": 18.2, "days_on_8_a100": 2.7},
    {"model": "FlashAttention, 2K", "perplexity": 17.6, "days_on_8_a100": 3.0},
    {"model": "FlashAttention, 4K", "perplexity": 17.5, "days_on_8_a100": 3.6},
]
"""arXiv 2205.14135, Table 4: perplexity of GPT-2 small on OpenWebText, and days on 8 A100."""

DIFFERENCES = ("paper_difference", "difference")
"""Keys of a row: difference from the first model, as the paper evaluates and on equal tokens."""


def write_table4(
    evaluations: Mapping[str, Row], comparisons: Mapping[str, list[Row]], budget: str, out: Path
) -> None:
    """Write table4.json, table4.md and the pictures into `out`, and print the tables.

    Args:
        evaluations: by corpus, results of `evaluation.tables.tabulate`.
        comparisons: by corpus, results of `evaluation.tables.compare`.
        budget: key of BUDGETS.
        out: folder.
    """
    runs = next(iter(evaluations.values()))["runs"]
    result = {
        "budget": budget,
        "paper": PAPER,
        "rows": {corpus: rows(tables) for corpus, tables in evaluations.items()},
        "key_tokens": {name: tables["key_tokens"] for name, tables in evaluations.items()},
        "comparisons": dict(comparisons),
        "runs": runs,
        "curves": curves(runs),
    }
    write_result(out / "table4.json", result)
    redraw(out / "table4.json")


def redraw(path: Path) -> None:
    """Rewrite the Markdown and the pictures next to the JSON, and print the tables."""
    result = read_result(path, "budget", "comparisons", "curves")
    for corpus, comparisons in result["comparisons"].items():
        draw_positions(comparisons, path.with_name(f"{path.stem}_positions_{corpus}.png"))
    continued = {run["label"] for run in result["runs"] if run["before"]}
    shared = models_on_shared_gpus(result["runs"])
    publish(path, markdown(result), draw(result["curves"], continued, shared))


def rows(tables: Result) -> list[Row]:
    """Cost and perplexity of each model: as the paper evaluates, on identical and on key tokens.

    A model that starts from another one's weights also counts the cost of those weights. Times are
    those of the seeds whose GPU was their own, if there are any.
    """
    chunks, strided = (
        {row["label"]: row for row in tables[name]} for name in ("as_trained_chunk", "as_trained")
    )
    key = {row["label"]: row for row in tables.get("as_trained_key", ())}
    scores = ("perplexity", "nats", "difference")
    shared = models_on_shared_gpus(tables["runs"])
    result = []
    for label, runs in _by_label(tables["runs"]).items():
        timed = on_own_gpu(runs) or runs
        # of the whole run, whose stages may differ in speed; without the first steps
        speeds = [
            run["tokens_per_s"] and run["tokens"] / (3600 * run["gpu_hours"]) for run in timed
        ]
        result.append(
            {
                "label": label,
                "seeds": len(runs),
                "tokens": runs[0]["tokens"] + cost_before(runs[0])["tokens"],
                "gpu_hours": mean(
                    run["gpu_hours"] + cost_before(run)["gpu_hours"] for run in timed
                ),
                # a short run has no speed, because the first steps are not timed
                "tokens_per_s": mean(speeds) if is_known(*speeds) else None,
                "shared_gpu": label in shared,
                **{f"paper_{name}": chunks[label][name] for name in scores},
                **{name: strided[label][name] for name in scores},
                **{f"key_{name}": key[label][name] if label in key else None for name in scores},
                "scored_tokens": strided[label]["tokens"],
                "stride": strided[label]["stride"],
            }
        )
    return result


def models_on_shared_gpus(runs: Sequence[Row]) -> set[str]:
    """Models whose times say nothing, because each of their runs shared its GPU with others."""
    return {label for label, seeds in _by_label(runs).items() if not on_own_gpu(seeds)}


def curves(runs: Sequence[Row]) -> dict[str, list[Row]]:
    """Validation loss of each model over tokens and GPU-hours, averaged over its seeds.

    GPU-hours are those of the seeds whose GPU was their own, if there are any. The curve of a model
    that starts from another one's weights begins where that curve ends.
    """

    def points(run: dict[str, Any]) -> list[Row]:
        before = cost_before(run)
        rest = [r | {key: r[key] + before[key] for key in COST} for r in run["evaluations"]]
        return [run["before"], *rest] if run["before"] else rest

    def average(runs: Sequence[Row], *names: str) -> list[Row]:
        at_once = zip(*map(points, runs), strict=False)
        return [{name: mean(row[name] for row in rows) for name in names} for rows in at_once]

    return {
        model: [
            cost | loss
            for cost, loss in zip(
                average(on_own_gpu(seeds) or seeds, *COST),
                average(seeds, "val_loss"),
                strict=False,
            )
        ]
        for model, seeds in _by_label(runs).items()
    }


def _by_label(runs: Sequence[Row]) -> dict[str, list[Row]]:
    labels = dict.fromkeys(run["label"] for run in runs)
    return {label: [run for run in runs if run["label"] == label] for label in labels}


def markdown(result: Result) -> str:
    """Tables of all corpora, after the paper's rows."""
    parts = [
        f"# Table 4 of the FlashAttention paper, budget {result['budget']!r}\n",
        "The paper: GPT-2 small on OpenWebText, 400,000 steps of 524,288 tokens.\n",
        markdown_table(
            ["model", "perplexity", "days on 8 A100"],
            [list(map(str, row.values())) for row in result["paper"]],
        ),
    ]
    for corpus, models in result["rows"].items():
        cells, minus = _model_cells(models), f"difference from {models[0]['label']}, nats"
        header = [minus if name in DIFFERENCES else name for name in cells[0]]
        parts += [
            f"Papilio, scored on {corpus}. Time is relative to {models[0]['label']}; differences "
            f"have 95% intervals {_interval_kind(models)}.\n",
            markdown_table(header, [list(row.values()) for row in cells]),
        ]
        if result["comparisons"][corpus]:
            parts += [
                "Model minus baseline, nats per token:\n",
                comparisons_table(result["comparisons"][corpus]),
            ]
        if key := result.get("key_tokens", {}).get(corpus):  # missing in old results
            parts.append(f"LongPPL is the perplexity on key tokens. {key_sentence(escaped(key))}\n")
    return "\n".join([*parts, trained_on(result["runs"]) + "\n"])


def models_table(result: Result) -> str:
    """Cost and perplexity of each model, from a result with a single corpus."""
    (models,) = result["rows"].values()
    return dict_table(
        {
            name.removeprefix("training "): cell
            for name, cell in cells.items()
            if name not in ("GPU-hours", *DIFFERENCES)
        }
        for cells in _model_cells(models)
    )


def differences_table(result: Result) -> str:
    """Questions and the differences that answer them; with several corpora, each row names its."""
    several = len(result["comparisons"]) > 1
    return dict_table(
        {**({"scored on": corpus} if several else {}), **cells}
        for corpus, comparisons in result["comparisons"].items()
        for cells in _comparison_cells(comparisons)
    )


def _model_cells(models: Sequence[Row]) -> list[dict[str, str]]:
    """Table cells with the cost and scores of each model; differences keep their keys."""
    hours = models[0]["gpu_hours"] or math.nan  # 0 if no step was timed
    has_key = any(is_known(row.get("key_perplexity")) for row in models)  # not in old results
    shared = {row["label"] for row in models if row.get("shared_gpu")}  # not in old results

    def timed(row: Row, value: float | None, how: str) -> str:
        return digits(None if row["label"] in shared else value, how)

    if models[0]["label"] in shared:
        hours = math.nan
    return [
        {
            "model": row["label"],
            "seeds": str(row["seeds"]),
            "training tokens": tokens_text(row["tokens"]),
            "tokens/s": timed(row, row["tokens_per_s"], ",.0f"),
            "GPU-hours": timed(row, row["gpu_hours"], ".3f"),
            "relative time": timed(row, row["gpu_hours"] / hours, ".2f"),
            "perplexity as the paper evaluates": f"{row['paper_perplexity']:.2f}",
            "paper_difference": difference_cell(row["paper_difference"]),
            "perplexity on identical tokens": f"{row['perplexity']:.2f}",
            "difference": difference_cell(row["difference"]),
            **({"LongPPL": digits(row["key_perplexity"], ".2f")} if has_key else {}),
        }
        for row in models
    ]


def _interval_kind(models: Sequence[Row]) -> str:
    """Describe the source of the intervals: seeds count where both models share several."""
    seeds = {row["label"]: {row[d]["seeds"] for d in DIFFERENCES if row[d]} for row in models}
    compared = [label for label, shared in seeds.items() if shared]
    single = [label for label in compared if 1 in seeds[label]]
    if not single:
        return "over documents and seeds"
    if single == compared:
        return "over documents only, because each comparison has one seed"
    return (
        "over documents and seeds, or over documents only where one seed is compared: "
        f"{', '.join(single)}"
    )


def comparisons_table(comparisons: Sequence[Row]) -> str:
    """Each question with the differences that answer it, from `evaluation.tables.compare`."""
    return dict_table(_comparison_cells(comparisons))


def _comparison_cells(comparisons: Sequence[Row]) -> list[dict[str, str]]:
    has_key = any(row.get("key") for row in comparisons)  # not in old results
    return [
        {
            "question": QUESTION_OF[row["label"], row["to_label"]].asks,
            "model": row["label"],
            "baseline": row["to_label"],
            "seeds": str(row["strided"]["seeds"]),
            "nats, as the paper evaluates": difference_cell(row["chunk"]),
            "nats, on identical tokens": difference_cell(row["strided"]),
            **({"nats, on key tokens": difference_cell(row["key"])} if has_key else {}),
            **{
                f"nats, {p['range']} tokens into a document": difference_cell(p)
                for p in row["parts"]
            },
        }
        for row in comparisons
    ]


def answers_table(larger: Result, smaller: Result) -> str:
    """Differences between models at a larger and a smaller budget, from one corpus each."""
    more, less = by_pair(larger), by_pair(smaller)
    many, few = (
        f"{tokens_text(models[0]['tokens'])} tokens"
        for result in (larger, smaller)
        for models in result["rows"].values()
    )
    none = {"chunk": None, "strided": None}
    on_key = {  # not in old results
        f"{name}, on key tokens": {pair: row.get("key") for pair, row in rows.items()}
        for name, rows in ((many, more), (few, less))
        if any(row.get("key") for row in rows.values())
    }
    return dict_table(
        {
            "question": QUESTION_OF[pair].asks,
            "model": pair[0],
            "baseline": pair[1],
            f"{many}, as the paper evaluates": difference_cell(more.get(pair, none)["chunk"]),
            f"{many}, on identical tokens": difference_cell(more.get(pair, none)["strided"]),
            f"{few}, on identical tokens": difference_cell(less.get(pair, none)["strided"]),
            **{name: difference_cell(rows.get(pair)) for name, rows in on_key.items()},
            f"seeds of {few}": str(less[pair]["strided"]["seeds"]) if pair in less else "-",
        }
        for pair in PAIRS
        if pair in more or pair in less
    )


def draw(
    curves: dict[str, list[Row]], continued: Collection[str], shared: Collection[str]
) -> Figure:
    """Draw validation perplexity over tokens and GPU-hours: one line per model, a few per panel.

    Models `continued` from another one's weights have their own panels, because their curves would
    overlap the ends of the others. Those on `shared` GPUs have no line over GPU-hours.
    """
    groups = []
    for is_continued in (False, True):
        models = [model for model in curves if (model in continued) == is_continued]
        n_rows = max(1, math.ceil(len(models) / len(COLOURS)))
        size = math.ceil(len(models) / n_rows)
        groups += [models[n : n + size] for n in range(0, len(models), size or 1)]
    figure = Figure(figsize=(8.5, 0.6 + 2.6 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 2, sharey="row", squeeze=False)
    for models, (left, right) in zip(groups, panels, strict=True):
        perplexity = {m: np.exp([p["val_loss"] for p in curves[m]]) for m in models}
        looks = styles_of(models)
        for model, look in looks.items():
            for axes, unit, divisor in zip((left, right), COST, (1e6, 1), strict=True):
                if axes is right and model in shared:
                    continue
                x = [p[unit] / divisor for p in curves[model]]
                axes.plot(x, perplexity[model], **look, ms=4, lw=1.2)
                axes.grid(alpha=0.3, which="both")
        ends = {model: values[-1] for model, values in perplexity.items()}
        highest = max(values.max() for values in perplexity.values())
        left.set_yscale("log")
        # cut off the steep start, which would leave no room to distinguish the ends
        left.set_ylim(0.97 * min(ends.values()), 1.03 * min(highest, 1.6 * max(ends.values())))
        for set_formatter in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
            set_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        name_ends(right, {m: (ends[m], looks[m]["color"]) for m in models}, gap=0.09)
        title = "continued" if models[0] in continued else "from scratch"
        left.set_title(title, loc="left", size=10)
    panels[-1, 0].set_xlabel("training tokens, millions")
    panels[-1, 1].set_xlabel("GPU-hours of training")
    figure.supylabel("validation perplexity", size=10)
    return figure


def draw_positions(comparisons: Sequence[Row], out: Path) -> None:
    """Draw the differences by position in the document; delete an outdated picture."""
    panels: dict[str, dict[str, list[Row]]] = {}
    for row in comparisons:
        label, other = row["label"], row["to_label"]
        question = QUESTION_OF[label, other]
        if question.by_position:
            line = f"{label}\nminus {other}"
            panels.setdefault(question.asks, {})[line] = row["document_position"]
    if panels:
        save(differences_by_bin(panels, "position in the document, tokens"), out)
    else:
        out.unlink(missing_ok=True)


command.main(lambda args: redraw(args.result))

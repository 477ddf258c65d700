"""The paper's Table 4 beside ours, and what training took, in JSON, Markdown and a picture.

python -m experiments.table4.report out/table4_minutes/table4.json    # Markdown and picture anew
"""

from experiments.reports import report_command

command = report_command(__name__)  # before PyTorch is loaded, which takes seconds

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from evaluation.markdown import digits, is_known, markdown_table, with_interval
from evaluation.pictures import differences_by_bin
from evaluation.report import trained_on
from evaluation.results import COST, Row, cost_before, read_result, write_result
from evaluation.style import COLOURS, name_ends, save, styles_of
from experiments.harness import Result
from experiments.reports import publish, table
from experiments.table4.questions import PAIRS, QUESTION_OF, by_pair

PAPER = [
    {"model": "Megatron-LM, 1K", "perplexity": 18.2, "days_on_8_a100": 4.7},
    {"model": "FlashAttention, 1K", "perplexity": 18.2, "days_on_8_a100": 2.7},
    {"model": "FlashAttention, 2K", "perplexity": 17.6, "days_on_8_a100": 3.0},
    {"model": "FlashAttention, 4K", "perplexity": 17.5, "days_on_8_a100": 3.6},
]
"""arXiv 2205.14135, Table 4: GPT-2 small on OpenWebText, perplexity, days on 8 A100."""

DIFFERENCES = ("paper_difference", "difference")
"""Entries of a row: how a model differs from the first, as the paper evaluates and on identical
tokens."""


def write_table4(
    evaluations: Mapping[str, Row], comparisons: Mapping[str, list[Row]], budget: str, out: Path
) -> None:
    """Write table4.json, table4.md and the pictures into `out`, and print the tables.

    By corpus, `evaluations` are of `evaluation.tables.tabulate`, `comparisons` of its `compare`.
    """
    runs = next(iter(evaluations.values()))["runs"]
    result = {
        "budget": budget,
        "paper": PAPER,
        "rows": {corpus: rows(tables) for corpus, tables in evaluations.items()},
        "comparisons": dict(comparisons),
        "runs": runs,
        "curves": curves(runs),
    }
    write_result(out / "table4.json", result)
    redraw(out / "table4.json")


def redraw(path: Path) -> None:
    """Write the Markdown and the pictures anew beside the JSON, and print the tables."""
    result = read_result(path, "budget", "comparisons", "curves")
    for corpus, comparisons in result["comparisons"].items():
        draw_positions(comparisons, path.with_name(f"{path.stem}_positions_{corpus}.png"))
    going_on = {run["label"] for run in result["runs"] if run["before"]}
    publish(path, markdown(result), draw(result["curves"], going_on))


def rows(tables: Result) -> list[Row]:
    """For each model its cost, its perplexity as the paper evaluates, and on identical tokens.

    What another model's weights took counts for those that start with them.
    """
    chunks, strided = (
        {row["label"]: row for row in tables[name]} for name in ("as_trained_chunk", "as_trained")
    )
    scores = ("perplexity", "nats", "difference")
    result = []
    for label, runs in _by_label(tables["runs"]).items():
        speeds = [run["tokens_per_s"] for run in runs]
        result.append(
            {
                "label": label,
                "seeds": len(runs),
                "tokens": runs[0]["tokens"] + cost_before(runs[0])["tokens"],
                "gpu_hours": mean(run["gpu_hours"] + cost_before(run)["gpu_hours"] for run in runs),
                # a run of few steps has none, as the first ones are not timed
                "tokens_per_s": mean(speeds) if is_known(*speeds) else None,
                **{f"paper_{name}": chunks[label][name] for name in scores},
                **{name: strided[label][name] for name in scores},
                "scored_tokens": strided[label]["tokens"],
                "stride": strided[label]["stride"],
            }
        )
    return result


def curves(runs: Sequence[Row]) -> dict[str, list[Row]]:
    """For each model the validation loss over tokens and GPU-hours, the mean over its seeds.

    The curve of a model that starts with another's weights begins where that one's ends.
    """

    def points(run: dict[str, Any]) -> list[Row]:
        before = cost_before(run)
        rest = [r | {key: r[key] + before[key] for key in COST} for r in run["evaluations"]]
        return [run["before"], *rest] if run["before"] else rest

    return {
        model: [
            {name: mean(r[name] for r in at_once) for name in (*COST, "val_loss")}
            for at_once in zip(*map(points, seeds), strict=False)
        ]
        for model, seeds in _by_label(runs).items()
    }


def _by_label(runs: Sequence[Row]) -> dict[str, list[Row]]:
    labels = dict.fromkeys(run["label"] for run in runs)
    return {label: [run for run in runs if run["label"] == label] for label in labels}


def markdown(result: Result) -> str:
    """The tables of all corpora, the paper's rows first."""
    parts = [
        f"# Table 4 of the FlashAttention paper, budget {result['budget']!r}\n",
        "The paper: GPT-2 small on OpenWebText, 400,000 steps of 524,288 tokens.\n",
        markdown_table(
            ["model", "perplexity", "days on 8 A100"],
            [list(map(str, row.values())) for row in result["paper"]],
        ),
    ]
    for corpus, models in result["rows"].items():
        cells, minus = _model_cells(models), f"minus {models[0]['label']}, nats"
        header = [minus if name in DIFFERENCES else name for name in cells[0]]
        parts += [
            f"Ours, scored on {corpus}. Time is relative to {models[0]['label']}'s; differences "
            f"have 95% intervals {_interval_kind(models)}.\n",
            markdown_table(header, [list(row.values()) for row in cells]),
        ]
        if result["comparisons"][corpus]:
            parts += [
                "One model minus the other, nats a token:\n",
                comparisons_table(result["comparisons"][corpus]),
            ]
    return "\n".join([*parts, trained_on(result["runs"]) + "\n"])


def models_table(result: Result) -> str:
    """Cost and perplexity of each model, of a result with a single corpus."""
    (models,) = result["rows"].values()
    return table(
        {
            name.removeprefix("training "): cell
            for name, cell in cells.items()
            if name not in ("GPU-hours", *DIFFERENCES)
        }
        for cells in _model_cells(models)
    )


def differences_table(result: Result) -> str:
    """The questions that a result with a single corpus answers, and the differences."""
    (comparisons,) = result["comparisons"].values()
    return comparisons_table(comparisons)


def _model_cells(models: Sequence[Row]) -> list[dict[str, str]]:
    """Cost and scores of each model; differences by name of their row's entry."""
    hours = models[0]["gpu_hours"] or math.nan  # a single step is not timed
    return [
        {
            "model": row["label"],
            "seeds": str(row["seeds"]),
            "training tokens": f"{row['tokens'] / 1e6:,.0f}M",
            "tokens/s": digits(row["tokens_per_s"], ",.0f"),
            "GPU-hours": f"{row['gpu_hours']:.3f}",
            "time": digits(row["gpu_hours"] / hours, ".2f"),
            "perplexity, as the paper evaluates": f"{row['paper_perplexity']:.2f}",
            "paper_difference": nats(row["paper_difference"]),
            "perplexity, on identical tokens": f"{row['perplexity']:.2f}",
            "difference": nats(row["difference"]),
        }
        for row in models
    ]


def _interval_kind(models: Sequence[Row]) -> str:
    """Whether the intervals of the differences count seeds: where both models share several."""
    seeds = {row["label"]: {row[d]["seeds"] for d in DIFFERENCES if row[d]} for row in models}
    compared = [label for label, shared in seeds.items() if shared]
    single = [label for label in compared if 1 in seeds[label]]
    if not single:
        return "over documents and seeds"
    if single == compared:
        return "over documents alone, as all are compared over one seed"
    return (
        "over documents and seeds, but over documents alone where one seed is compared: "
        f"{', '.join(single)}"
    )


def comparisons_table(comparisons: Sequence[Row]) -> str:
    """Every question with the differences, of `evaluation.tables.compare`, that answer it."""
    return table(
        {
            "question": QUESTION_OF[row["label"], row["to_label"]].asks,
            "model": row["label"],
            "minus": row["to_label"],
            "seeds": str(row["strided"]["seeds"]),
            "as the paper evaluates, nats": nats(row["chunk"]),
            "on identical tokens, nats": nats(row["strided"]),
            **{f"of these {p['range']} tokens into a document": nats(p) for p in row["parts"]},
        }
        for row in comparisons
    )


def answers_table(larger: Result, smaller: Result) -> str:
    """Differences between models, in a result of much training and one of less, a corpus each."""

    more, less = by_pair(larger), by_pair(smaller)
    none = {"chunk": None, "strided": None}
    return table(
        {
            "question": QUESTION_OF[pair].asks,
            "model": pair[0],
            "minus": pair[1],
            "larger budget, as the paper evaluates": nats(more.get(pair, none)["chunk"]),
            "larger budget, on identical tokens": nats(more.get(pair, none)["strided"]),
            "smaller budget, on identical tokens": nats(less.get(pair, none)["strided"]),
            "seeds of these": str(less[pair]["strided"]["seeds"]) if pair in less else "",
        }
        for pair in PAIRS
        if pair in more or pair in less
    )


def nats(difference: Row | None) -> str:
    """A difference with its interval; nothing for none."""
    return "" if difference is None else with_interval(difference["nats"], difference["interval"])


def draw(curves: dict[str, list[Row]], going_on: Collection[str]) -> Figure:
    """Validation perplexity over tokens and over GPU-hours, one line a model, few models a row.

    Models that started with the weights of another have rows of their own: their curves would
    lie on the ends of the others'.
    """
    groups = []
    for kind in (False, True):
        models = [model for model in curves if (model in going_on) == kind]
        n_rows = max(1, math.ceil(len(models) / len(COLOURS)))
        most = math.ceil(len(models) / n_rows)
        groups += [models[n : n + most] for n in range(0, len(models), most or 1)]
    figure = Figure(figsize=(8.5, 0.6 + 2.6 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 2, sharey="row", squeeze=False)
    for models, (left, right) in zip(groups, panels, strict=True):
        perplexity = {m: np.exp([p["val_loss"] for p in curves[m]]) for m in models}
        looks = styles_of(models)
        for model, look in looks.items():
            for axes, unit, divisor in zip((left, right), COST, (1e6, 1), strict=True):
                x = [p[unit] / divisor for p in curves[model]]
                axes.plot(x, perplexity[model], **look, ms=4, lw=1.2)
                axes.grid(alpha=0.3, which="both")
        ends = {model: values[-1] for model, values in perplexity.items()}
        highest = max(values.max() for values in perplexity.values())
        left.set_yscale("log")
        # a little above the ends: the steep start would leave no room to tell them apart
        left.set_ylim(0.97 * min(ends.values()), 1.03 * min(highest, 1.6 * max(ends.values())))
        for set_formatter in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
            set_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        name_ends(right, {m: (ends[m], looks[m]["color"]) for m in models}, gap=0.09)
        left.set_title("going on" if models[0] in going_on else "from scratch", loc="left", size=10)
    panels[-1, 0].set_xlabel("training tokens, millions")
    panels[-1, 1].set_xlabel("GPU-hours of training")
    figure.supylabel("validation perplexity", size=10)
    return figure


def draw_positions(comparisons: Sequence[Row], out: Path) -> None:
    """Draw the differences by position in the document; a picture of others must not stay."""
    panels: dict[str, dict[str, list[Row]]] = {}
    for row in comparisons:
        label, other = row["label"], row["to_label"]
        question = QUESTION_OF[label, other]
        if question.by_position:
            line = f"{label}\nminus {other}"
            panels.setdefault(question.asks, {})[line] = row["document_position"]
    if panels:
        save(differences_by_bin(panels, "tokens before the scored one in its document"), out)
    else:
        out.unlink(missing_ok=True)


command.main(lambda args: redraw(args.result))

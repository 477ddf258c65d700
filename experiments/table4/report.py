"""The paper's Table 4 beside ours, and what training took, in JSON, Markdown and a picture.

python -m experiments.table4.report out/table4_minutes/table4.json    # Markdown and picture anew
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.command_line import command_parser, errors_as_sentences
from data.files import write_atomically
from evaluation.markdown import digits, is_known, markdown_table, with_interval
from evaluation.report import trained_on
from evaluation.results import COST, cost_before, read_result, write_result
from evaluation.style import Styles, save, styles_of
from experiments.table4.questions import comparisons_table, draw_positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER = (
    ("Megatron-LM, 1K", 18.2, 4.7),
    ("FlashAttention, 1K", 18.2, 2.7),
    ("FlashAttention, 2K", 17.6, 3.0),
    ("FlashAttention, 4K", 17.5, 3.6),
)
"""arXiv 2205.14135, Table 4: GPT-2 small on OpenWebText, perplexity, days on 8 A100."""

RESULT = "table4.json"


def write_table4(
    evaluations: Mapping[str, dict[str, Any]],
    comparisons: Mapping[str, list[dict[str, Any]]],
    budget: str,
    out: Path,
) -> None:
    """Write table4.json, table4.md and the pictures into `out`, and print the tables.

    By corpus, `evaluations` are of `evaluation.tables.tabulate`, `comparisons` of its `compare`.
    """
    runs = next(iter(evaluations.values()))["runs"]
    names = ("model", "perplexity", "days_on_8_a100")
    result = {
        "budget": budget,
        "paper": [dict(zip(names, row, strict=True)) for row in PAPER],
        "rows": {corpus: rows(tables) for corpus, tables in evaluations.items()},
        "comparisons": dict(comparisons),
        "runs": runs,
        "curves": curves(runs),
    }
    write_result(out / RESULT, result)
    redraw(out / RESULT)


def redraw(path: Path) -> None:
    """Write the Markdown and the pictures anew beside the JSON, and print the tables."""
    result = read_result(path, "budget", "comparisons", "curves")
    text = markdown(result)
    write_atomically(path.with_suffix(".md"), text.encode())
    going_on = {run["label"] for run in result["runs"] if run["before"]}
    draw(result["curves"], going_on, path.with_suffix(".png"))
    for corpus, comparisons in result["comparisons"].items():
        draw_positions(comparisons, path.with_name(f"{path.stem}_positions_{corpus}.png"))
    print(text)
    print(f"wrote {path.with_suffix('.md')} and its pictures")


def rows(tables: dict[str, Any]) -> list[dict[str, Any]]:
    """For each model its cost, its perplexity as the paper evaluates, and on identical tokens.

    What another model's weights took counts for those that start with them.
    """
    result = []
    for label, runs in _by_label(tables["runs"]).items():
        speeds = [run["tokens_per_s"] for run in runs]
        (chunk,) = (row for row in tables["as_trained_chunk"] if row["label"] == label)
        (strided,) = (row for row in tables["as_trained"] if row["label"] == label)
        result.append(
            {
                "label": label,
                "seeds": len(runs),
                "tokens": runs[0]["tokens"] + cost_before(runs[0])["tokens"],
                "gpu_hours": mean(run["gpu_hours"] + cost_before(run)["gpu_hours"] for run in runs),
                # a run of few steps has none, as the first ones are not timed
                "tokens_per_s": mean(speeds) if is_known(*speeds) else None,
                **{f"paper_{name}": chunk[name] for name in ("perplexity", "nats", "difference")},
                **{name: strided[name] for name in ("perplexity", "nats", "difference")},
                "scored_tokens": strided["tokens"],
                "stride": strided["stride"],
            }
        )
    return result


def curves(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, float]]]:
    """For each model the validation loss over tokens and GPU-hours, the mean over its seeds.

    The curve of a model that starts with another's weights begins where that one's ends.
    """

    def points(run: dict[str, Any]) -> list[dict[str, Any]]:
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


def _by_label(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    labels = dict.fromkeys(run["label"] for run in runs)
    return {label: [run for run in runs if run["label"] == label] for label in labels}


def markdown(result: dict[str, Any]) -> str:
    """The tables of all corpora, the paper's rows first."""
    parts = [
        f"# Table 4 of the FlashAttention paper, budget {result['budget']!r}\n",
        "The paper: GPT-2 small on OpenWebText, 400,000 steps of 524,288 tokens.\n",
        markdown_table(
            ["model", "perplexity", "days on 8 A100"],
            [list(map(str, row.values())) for row in result["paper"]],
        ),
    ]
    for corpus, table in result["rows"].items():
        parts += [
            f"Ours, scored on {corpus}. Time is relative to {table[0]['label']}'s; differences "
            f"have 95% intervals {_interval_kind(table)}.\n",
            _models_table(table),
        ]
        if result["comparisons"][corpus]:
            parts += [
                "One model minus the other, nats a token:\n",
                comparisons_table(result["comparisons"][corpus]),
            ]
    return "\n".join([*parts, trained_on(result["runs"]) + "\n"])


def _models_table(table: Sequence[dict[str, Any]]) -> str:
    first = table[0]
    hours = first["gpu_hours"] or math.nan  # a single step is not timed
    minus = f"minus {first['label']}, nats"
    return markdown_table(
        [
            *("model", "seeds", "training tokens", "tokens/s", "GPU-hours", "time"),
            *("perplexity, as the paper evaluates", minus),
            *("perplexity, on identical tokens", minus),
        ],
        [
            [
                row["label"],
                str(row["seeds"]),
                f"{row['tokens'] / 1e6:,.0f}M",
                digits(row["tokens_per_s"], ",.0f"),
                f"{row['gpu_hours']:.3f}",
                digits(row["gpu_hours"] / hours, ".2f"),
                f"{row['paper_perplexity']:.2f}",
                _difference(row["paper_difference"]),
                f"{row['perplexity']:.2f}",
                _difference(row["difference"]),
            ]
            for row in table
        ],
    )


def _interval_kind(table: Sequence[dict[str, Any]]) -> str:
    """Whether the intervals of the differences count seeds: where both models share several."""
    compared = [row for row in table if row["paper_difference"] or row["difference"]]
    single = [
        row["label"]
        for row in compared
        if any(d and d["seeds"] == 1 for d in (row["paper_difference"], row["difference"]))
    ]
    if not single:
        return "over documents and seeds"
    if len(single) == len(compared):
        return "over documents alone, as all are compared over one seed"
    return (
        "over documents and seeds, but over documents alone where one seed is compared: "
        f"{', '.join(single)}"
    )


def _difference(difference: dict[str, Any] | None) -> str:
    return "" if difference is None else with_interval(difference["nats"], difference["interval"])


def draw(curves: dict[str, list[dict[str, float]]], going_on: Collection[str], out: Path) -> None:
    """Validation perplexity over tokens and over GPU-hours, one line a model.

    Models that started with the weights of another have a row of their own: their curves would
    lie on the ends of the others'.
    """
    # matplotlib takes a second to load, which --help should not wait for
    from matplotlib.figure import Figure

    order = sorted(curves, key=lambda model: model in going_on)
    scratch = [model for model in order if model not in going_on]
    titled = {"from scratch": scratch, "with the weights of another model": order[len(scratch) :]}
    kinds = {title: models for title, models in titled.items() if models}
    figure = Figure(figsize=(13, 1 + 3.7 * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), 2, sharey="row", squeeze=False)
    styles = styles_of(order)
    for (title, models), (left, right) in zip(kinds.items(), panels, strict=True):
        _draw_row({model: curves[model] for model in models}, styles, left, right)
        if len(kinds) > 1:
            left.set_title(title, loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("training tokens, millions")
    panels[-1, 1].set_xlabel("GPU-hours of training")
    figure.supylabel("validation perplexity", fontsize=10)
    save(figure, out)


def _draw_row(
    curves: dict[str, list[dict[str, float]]], styles: Styles, left: "Axes", right: "Axes"
) -> None:
    """The curves over tokens on the left and over GPU-hours on the right."""
    from matplotlib.ticker import LogFormatter

    perplexity = {m: np.exp([p["val_loss"] for p in points]) for m, points in curves.items()}
    for model, points in curves.items():
        look: dict[str, Any] = {**styles[model], "label": model, "ms": 4, "lw": 1.2}
        for axes, unit, divisor in zip((left, right), COST, (1e6, 1), strict=True):
            axes.plot([p[unit] / divisor for p in points], perplexity[model], **look)
            axes.grid(alpha=0.3, which="both")
    ends = [values[-1] for values in perplexity.values()]
    highest = max(values.max() for values in perplexity.values())
    left.set_yscale("log")
    # a little above the ends: the steep start would leave no room to tell them apart
    left.set_ylim(0.97 * min(ends), 1.03 * min(highest, 1.6 * max(ends)))
    for set_formatter in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
        set_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = command_parser(__doc__, __spec__)
    parser.add_argument("result", type=Path, metavar="FILE", help="a table4.json")
    redraw(parser.parse_args(argv).result)


if __name__ == "__main__":
    with errors_as_sentences():
        main()

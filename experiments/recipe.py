"""Effect of each part of the modern recipe on the loss, with intervals.

    python -m experiments.recipe --data out/data/long_documents --stride 1024

Trains the modern recipe (configs/modern_small_4k.yaml) with each of its parts removed, and with
each candidate added, on 118M tokens with three seeds, and GPT-2's recipe at two learning rates. It
is a sweep of experiments.table4, with the same options: it resumes, and several machines can share
it. Writes OUT/table4.json, and OUT/recipe.json with a table and a picture of all parts.

At equal time, a part that makes a step slower leaves fewer tokens. This is estimated from the times
of experiments.train_steps.recipe_step (--times), and from the loss of the recipe when it is trained
for as long as GPT-2's.
"""

from argparse import Namespace
from pathlib import Path

from experiments.harness import Command
from experiments.table4.options import add_sweep_options, check_sweep_options
from experiments.table4.parts import NAMES, PAIRS_OF_PARTS, WITH, WITHOUT

BASE = ("4k", "4k_same_lr", "recipe", "recipe_same_time")

WHOLE_RECIPE = ("recipe", "4k"), ("recipe_same_time", "recipe")
"""Pairs of models that differ by more than one part."""

TIMES = Path("docs/results/recipe_step.json")


def check(args: Namespace) -> None:
    """Check the options of the sweep, and that the file of --times exists."""
    check_sweep_options(args)
    if args.times is not None and not args.times.is_file():
        raise ValueError(
            f"--times={args.times} is not a file. Make it with experiments.train_steps.recipe_step"
        )


command = Command(__name__)
command.add("--parts", nargs="+", choices=NAMES, default=[*NAMES], metavar="PART",
    help=f"parts and candidates (default: {', '.join(NAMES)})")  # fmt: skip
command.add("--times", type=Path, metavar="FILE",
    help=f"result of experiments.train_steps.recipe_step (default: {TIMES}, if it exists)",
)  # fmt: skip
add_sweep_options(command, "out/recipe")
command.read(check=check)

import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure

from evaluation.markdown import dict_table, difference_cell
from evaluation.results import Row, read_result, write_result
from evaluation.statistics import Estimate, pooled_half_width, widen
from experiments.harness import Result
from experiments.reports import publish
from experiments.table4 import report
from experiments.table4.forest import draw_effects
from experiments.table4.questions import by_pair
from experiments.table4.sweep import sweep
from experiments.train_steps.recipe_step import configs_of, relative_time, seconds_per_token
from model.gpt import GPT

BUDGET = "minutes"


def effects(
    result: Result, seconds: Mapping[str, float], parameters: Mapping[str, int]
) -> list[Row]:
    """Effect of each part, from the result of the sweep, the most useful at equal tokens first.

    tokens is the loss with the part minus the loss without it at equal tokens, in nats with its
    interval, and same_time the same at equal time. The variance between seeds is pooled over all
    comparisons with several seeds. time is the relative time of a token with the part, and
    parameters are those that the part adds.

    Args:
        result: of the sweep. Without recipe_same_time, same_time is None.
        seconds: per token of each model. Without a model of the part, time and same_time are None.
        parameters: number of parameters of each model.
    """
    gaps = by_pair(result)
    slope = loss_per_log_tokens(result)
    compared = [gaps[pair]["strided"] for pair in (*WHOLE_RECIPE, *PAIRS_OF_PARTS) if pair in gaps]
    half_widths = [
        (gap["seeds"], gap["half_width_of_seeds"]) for gap in compared if gap["seeds"] > 1
    ]
    rows = []
    for part, (with_it, without) in zip({**WITHOUT, **WITH}.values(), PAIRS_OF_PARTS, strict=True):
        if (with_it, without) not in gaps:
            continue
        gap = _with_pooled_seeds(gaps[with_it, without]["strided"], half_widths)
        time = relative_time(seconds, with_it, without)
        shift = None if slope is None or time is None else slope * math.log(time)
        rows.append(
            {
                "part": part.title,
                "in_recipe": with_it == "recipe",
                "tokens": gap,
                "time": time,
                "same_time": None if shift is None else _shifted(gap, shift),
                "parameters": parameters[with_it] - parameters[without],
            }
        )
    return sorted(rows, key=lambda row: (not row["in_recipe"], row["tokens"]["nats"]))


def _with_pooled_seeds(gap: Row, half_widths: Sequence[tuple[int, float]]) -> Row:
    # null in JSON: too few documents
    low, high = (math.nan if end is None else end for end in gap["interval_of_documents"])
    documents = Estimate(mean=gap["nats"], low=low, high=high)
    pooled = widen(documents, pooled_half_width(gap["seeds"], half_widths))
    return {"nats": pooled.mean, "interval": [pooled.low, pooled.high], "seeds": gap["seeds"]}


def count_parameters(models: Sequence[str]) -> dict[str, int]:
    """Number of parameters of each model, including all tables."""
    with torch.device("meta"):
        gpts = {name: GPT(config.model) for name, config in configs_of(models).items()}
    return {name: sum(p.numel() for p in gpt.parameters()) for name, gpt in gpts.items()}


def _shifted(gap: Row, shift: float) -> Row:
    return {"nats": gap["nats"] + shift, "interval": [end + shift for end in gap["interval"]]}


def loss_per_log_tokens(result: Result) -> float | None:
    """Nats by which the recipe's loss falls when its tokens are multiplied by e, about its end.

    None if recipe_same_time is not in the result, or has as many tokens.
    """
    gap = by_pair(result).get(("recipe_same_time", "recipe"))
    (models,) = result["rows"].values()
    tokens = {row["label"]: row["tokens"] for row in models}
    if gap is None or tokens["recipe_same_time"] == tokens["recipe"]:
        return None
    return -gap["strided"]["nats"] / math.log(tokens["recipe_same_time"] / tokens["recipe"])


def overview(result: Result) -> Result:
    """Result without the models of single parts."""

    def without_parts(name: str) -> dict[str, list[Row]]:
        return {
            corpus: [row for row in rows if {row["label"], row.get("to_label")} <= {*BASE, None}]
            for corpus, rows in result[name].items()
        }

    return result | {name: without_parts(name) for name in ("rows", "comparisons")}


def parts_table(result: Result) -> str:
    """Table of the effects; a negative difference is a gain."""
    return dict_table(
        {
            "part": row["part"],
            "in the recipe": "yes" if row["in_recipe"] else "no",
            "seeds": str(row["tokens"]["seeds"]),
            "nats, equal tokens": difference_cell(row["tokens"]),
            "relative time": "-" if row["time"] is None else f"{row['time']:.3f}",
            "nats, equal time": difference_cell(row["same_time"]),
            "parameters": f"{row['parameters'] / 1e6:+.1f}M" if row["parameters"] else "-",
        }
        for row in result["effects"]
    )


def draw(result: Result) -> Figure:
    """Draw the effects at equal tokens (filled) and at equal time (open)."""
    groups = {
        title: {
            row["part"]: (row["tokens"], row["same_time"])
            for row in result["effects"]
            if row["in_recipe"] == kept
        }
        for title, kept in (("Parts of the recipe", True), ("Candidates", False))
    }
    names = "equal tokens", "equal time"
    return draw_effects(groups, names, ("tokens", "time"), limit=0.22)


def draw_curves(result: Result) -> Figure:
    """Draw the validation perplexity of the recipe and of GPT-2's over tokens and GPU-hours."""
    runs = [run for run in result["runs"] if run["label"] in {"4k", "recipe", "recipe_same_time"}]
    return report.draw(report.curves(runs), (), report.models_on_shared_gpus(runs))


@command.main
def main(args: Namespace) -> None:
    """Run the command."""
    out, times = args.out or Path("out/recipe"), args.times or TIMES
    if not times.exists():
        print(f"{times} does not exist, so the report has no times of parts")
    models = [*BASE, *(NAMES[name] for name in args.parts)]
    sweep(args, models, BUDGET, out)
    table4 = read_result(out / "table4.json")
    seconds = seconds_per_token(read_result(times, "rows")["rows"]) if times.exists() else {}
    result = {
        "effects": effects(table4, seconds, count_parameters(models)),
        "loss_per_log_tokens": loss_per_log_tokens(table4),
    }
    result |= {key: table4[key] for key in ("rows", "comparisons", "runs")}
    path = out / "recipe.json"
    write_result(path, result)
    if result["effects"]:
        publish(path, parts_table(result), draw(result))
    else:
        print("no part was compared: the recipe and a model of --parts must both be scored")

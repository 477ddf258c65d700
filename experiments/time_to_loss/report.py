"""Seconds to nanoGPT's loss by recipe: answer, tables and picture."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from matplotlib.figure import Figure

from evaluation.markdown import dict_table
from evaluation.results import Row
from evaluation.style import COLOURS
from experiments.harness import Result
from experiments.reports import tokens_text
from experiments.style import OURS, PEERS

NANOGPT = "nanogpt"
PAPILIO = {
    "4k": "Papilio, GPT-2's recipe",
    "4k_learned": "Papilio, GPT-2's recipe, learned positions",
    "recipe": "Papilio, modern recipe",
}
"""Our contenders, which are models of Table 4, and their names in tables."""
NAMES = {NANOGPT: "nanoGPT, cuDNN attention", **PAPILIO}
_LOOKS = {
    NANOGPT: PEERS["nanoGPT, cuDNN"],
    "4k": COLOURS[4],
    "4k_learned": COLOURS[3],
    "recipe": OURS,
}


class Answer(NamedTuple):
    """Seconds of training to a loss."""

    seconds: float
    bound: Literal["", "at most", "more than"]
    """Empty if runs bracket the loss: then the seconds are interpolated."""

    def text(self) -> str:
        """Seconds with the bound."""
        return f"{self.bound} {self.seconds:.0f} s".lstrip()

    def speedup(self, seconds: float) -> str:
        """`seconds` of another recipe relative to these, with the bound."""
        bound = {"": "", "at most": "at least ", "more than": "less than "}[self.bound]
        return f"{bound}{seconds / self.seconds:.2f}x"


def seconds_to(loss: float, runs: Sequence[Row]) -> Answer:
    """Seconds that a recipe needs for a validation loss, from its runs.

    The shortest run that reached it, and the longest of the shorter ones, bracket it. Between them,
    the loss is linear in the logarithm of the seconds.
    """
    runs = sorted(runs, key=lambda run: run["seconds"])
    after = next((n for n, run in enumerate(runs) if run["val_loss"] <= loss), None)
    if after is None:
        return Answer(runs[-1]["seconds"], "more than")
    if after == 0:
        return Answer(runs[0]["seconds"], "at most")
    (x0, y0), (x1, y1) = (
        (math.log(run["seconds"]), run["val_loss"]) for run in runs[after - 1 : after + 1]
    )
    return Answer(math.exp(x0 + (x1 - x0) * (y0 - loss) / (y0 - y1)), "")


def target(result: Result) -> Row:
    """nanoGPT's run, whose loss is the target.

    Raises:
        ValueError: it has not been measured.
    """
    for run in result["runs"]:
        if run["contender"] == NANOGPT:
            return run
    raise ValueError("no run of nanoGPT, whose loss is the target. Pass --nanogpt FOLDER")


def by_contender(result: Result) -> dict[str, list[Row]]:
    """Runs of each contender, in the order of NAMES, the shortest first."""
    order = [*NAMES]
    runs = sorted(result["runs"], key=lambda run: (order.index(run["contender"]), run["seconds"]))
    return {name: [*group] for name, group in groupby(runs, key=lambda run: run["contender"])}


def answers_table(result: Result) -> str:
    """Seconds that each recipe needs for nanoGPT's loss."""
    goal = target(result)

    def line(name: str, runs: list[Row]) -> dict[str, str]:
        answer = seconds_to(goal["val_loss"], runs)
        if name == NANOGPT:
            answer = Answer(goal["seconds"], "")
        return {
            "recipe": NAMES[name],
            f"training to a validation loss of {goal['val_loss']:.3f}": answer.text(),
            "speedup": answer.speedup(goal["seconds"]),
            "runs: seconds (loss)": ", ".join(
                f"{run['seconds']:.0f} ({run['val_loss']:.3f})" for run in runs
            ),
        }

    return dict_table(line(name, runs) for name, runs in by_contender(result).items())


def runs_table(result: Result) -> str:
    """All runs: steps, tokens, seconds and validation loss."""
    return dict_table(
        {
            "recipe": NAMES[name],
            "steps": f"{run['steps']:,}",
            "tokens": tokens_text(run["tokens"]),
            "training": f"{run['seconds']:.0f} s",
            "ms a step": f"{1000 * run['seconds'] / run['steps']:.1f}",
            "validation loss": f"{run['val_loss']:.4f}",
        }
        for name, runs in by_contender(result).items()
        for run in runs
    )


def draw(result: Result) -> Figure:
    """Draw validation loss against seconds of training, a curve per run, and nanoGPT's loss."""
    goal = target(result)["val_loss"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, runs in by_contender(result).items():
        for number, run in enumerate(runs):
            points = [(point["seconds"], point["val_loss"]) for point in run["curve"]]
            label = NAMES[name] if number == 0 else None
            axes.plot(*zip(*points, strict=True), color=_LOOKS[name], lw=1.5, label=label)
            axes.plot(run["seconds"], run["val_loss"], "o", color=_LOOKS[name])
    axes.axhline(goal, color="black", lw=0.8, ls="--")
    axes.set(xlabel="seconds of training on one GPU", ylabel="validation loss, nats")
    axes.set_ylim(top=goal + 1.5)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["right", "top"]].set_visible(False)
    axes.legend(frameon=False)
    return figure

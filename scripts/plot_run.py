"""Plot the perplexity of one or more runs over tokens and GPU-hours.

python -m scripts.plot_run out/quickstart [RUN ...] [--out perplexity.png]

For classifiers it plots the accuracy over examples.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import command_parser, parse_before_imports, user_errors_as_messages


@parse_before_imports
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add(
        "--out",
        type=Path,
        help="picture (default: in the first run)",
    )
    return parser.parse_args(argv)


from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from evaluation.results import hours_name
from evaluation.runs import origin_cost
from evaluation.style import styles_of
from training.config import RUN_CONFIG
from training.environment import read_starts
from training.language.config import TrainConfig
from training.metrics import METRICS, read_metrics
from training.tasks import read_run

# ratios of the top to the highest validation perplexity, and of the lowest to the bottom
HEADROOM, MARGIN = 1.5, 1.05
HOURS = "gpu_hours"
TOO_HIGH = 100.0  # nats; higher losses come from diverged runs and are not plotted


class Curve(NamedTuple):
    """Quantity to plot for GPTs or for classifiers."""

    name: str
    convert: Callable[[Any], Any]
    """Function that computes the quantity from the recorded values."""
    training: str
    """Key of the values in training records."""
    validation: str
    """Key of the values in evaluation records."""
    unit: str
    """Key of the amount of training data."""
    divisor: float
    unit_label: str


PERPLEXITY = Curve("perplexity", np.exp, "loss", "val_loss", "tokens", 1e6, "tokens seen, millions")
ACCURACY = Curve(
    "accuracy, %", lambda share: 100 * np.array(share), "accuracy", "val_accuracy", "examples", 1e3,
    "examples seen, thousands",
)  # fmt: skip


def curve_of(runs: Sequence[Path]) -> Curve:
    """Return the quantity to plot for these runs.

    Raises:
        FileNotFoundError: a folder has no records.
        ValueError: some runs are classifiers and others are not.
    """
    kinds = {run: ACCURACY if "accuracy" in _records(run)[0] else PERPLEXITY for run in runs}
    if len(set(kinds.values())) > 1:
        classifiers = ", ".join(str(run) for run, kind in kinds.items() if kind is ACCURACY)
        raise ValueError(
            f"{classifiers}: run(s) of classifiers, and others are of GPTs, which have no "
            "accuracy: plot them separately"
        )
    return kinds[runs[0]]


def draw_runs(runs: Sequence[Path]) -> Figure:
    """Plot perplexity over tokens (left) and over GPU-hours (right), with one colour per run.

    For classifiers, plot the accuracy over examples.

    Dots are evaluations on the whole validation set; the thin line is exp(training loss). Once a
    run has two evaluations, the y-axis ends slightly above the highest one. Otherwise the steep
    start of training would hide their differences. Runs that did not record GPU-hours appear on the
    left only. A run that started from the weights of another begins where that one ends.

    Raises:
        FileNotFoundError: a folder has no records.
    """
    curve = curve_of(runs)
    figure = Figure(figsize=(8.5, 4), layout="constrained")
    panels = left, right = figure.subplots(ncols=2, sharey=True)
    tops, lows = [], []
    names = [run.resolve().name for run in runs]
    looks = styles_of(map(str, runs))
    for run, name in zip(runs, names, strict=True):
        records, has_whole_cost = _read(run)
        title = name if names.count(name) == 1 else str(run)
        if not has_whole_cost:
            title += " (without the cost of its initial weights)"
        for axes, unit, divisor in ((left, curve.unit, curve.divisor), (right, HOURS, 1)):
            look = looks[str(run)]
            for kind, label, style in (
                (curve.training, "training", look | {"lw": 0.8, "alpha": 0.5, "marker": ""}),
                (curve.validation, "validation", look | {"ms": 4, "lw": 1.5}),
            ):
                plotted = [r for r in records if unit in r and r.get(kind, TOO_HIGH) < TOO_HIGH]
                if not plotted:
                    continue
                x = [r[unit] / divisor for r in plotted]
                y = curve.convert([r[kind] for r in plotted])
                axes.plot(x, y, label=f"{title}, {label}", **style)
                lows.append(y.min() / MARGIN)
                if kind == "val_loss" and len(plotted) > 1:
                    tops.append(HEADROOM * y.max())
    if curve is PERPLEXITY:
        left.set_yscale("log")
        for set_formatter in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
            set_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        if tops:
            left.set_ylim(min(lows), max(tops))
        nats = right.secondary_yaxis("right", functions=(np.log, np.exp))
        nats.set_yscale("linear")
        nats.set_ylabel("loss, nats per token")
    left.set_xlabel(curve.unit_label)
    left.set_ylabel(curve.name)
    starts = [start for run in runs for start in read_starts(run)]
    right.set_xlabel(f"{hours_name(starts)} of training")
    for axes in panels:
        axes.grid(alpha=0.3, which="both")
        if not axes.lines:
            axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return figure


def _read(run: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the records of a run, and whether their cost is complete.

    If the run started from the weights of another run, the last evaluation of that run comes first,
    and its cost is added. The cost of imported weights is unknown.
    """
    records = _records(run)
    path = run / RUN_CONFIG
    if not path.exists() or (config := read_run([str(path)])).run.init_from is None:
        return records, True
    if not isinstance(config, TrainConfig):  # a classifier may be pretrained on another objective
        return records, False
    origin = origin_cost(run, config)
    if origin is None:
        return records, False
    units = PERPLEXITY.unit, HOURS
    records = [r | {unit: r[unit] + origin[unit] for unit in units if unit in r} for r in records]
    return [origin, *records], True


def _records(run: Path) -> list[dict[str, Any]]:
    records = read_metrics(run)
    if not records:
        raise FileNotFoundError(f"{run} has no records in {METRICS}: is it the folder of a run?")
    return records


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    name = curve_of(args.runs).name.partition(",")[0]
    out = args.out or args.runs[0] / f"{name}.png"
    draw_runs(args.runs).savefig(out, dpi=120)
    print(f"wrote {out}")


if __name__ == "__main__":
    with user_errors_as_messages():
        main()

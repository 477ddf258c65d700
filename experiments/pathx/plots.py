"""The picture of a report on Path-X.

matplotlib takes a second to load, which --help should not wait for: functions load it themselves.
"""

from typing import TYPE_CHECKING, Any

from evaluation.style import styles_of
from experiments.pathx.tables import TITLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(result: dict[str, Any]) -> "Figure":
    """Validation accuracy over the images seen in all stages so far, a line a stage and seed.

    Args:
        result: as `experiments.pathx.report` wrote it.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    styles = styles_of(TITLES)
    runs = {f"{run['stage']}_seed{run['seed']}": run for run in result["runs"]}
    titled = set()
    for run in runs.values():
        stage = run["stage"]
        first = images_before(run, runs)
        millions = [(first + n) / 1e6 for n in run["curve"]["examples"]]
        axes.plot(
            millions,
            run["curve"]["val_accuracy"],
            color=styles[stage]["color"],
            ls=styles[stage]["linestyle"],
            lw=1.4,
            label=None if stage in titled else TITLES[stage],
        )
        titled.add(stage)
    axes.axhline(50, color="#888888", lw=0.8)
    for row in result["paper"]:
        axes.axhline(row["pathx"], color="#888888", ls=":", lw=1)
        axes.annotate(
            f"{row['model']} on Path-X, the paper's",
            (1, row["pathx"]),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
            color="#888888",
        )
    axes.set_xlabel("training images seen, millions, with those of the stages before")
    axes.set_ylabel("validation accuracy, %")
    axes.grid(alpha=0.3)
    figure.legend(fontsize=9, loc="outside upper center", ncols=3)
    return figure


def images_before(run: dict[str, Any], runs: dict[str, dict[str, Any]]) -> int:
    """Images seen in the stages that a run begins with, as far as they are among `runs`."""
    before = runs.get(run["begins_with"] or "")
    return 0 if before is None else before["examples"] + images_before(before, runs)

"""The picture of a report on Long Range Arena.

matplotlib takes a second to load, which --help should not wait for: functions load it themselves.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from evaluation.style import styles_of
from experiments.lra.jobs import ATTENTIONS, TASKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(result: dict[str, Any]) -> "Figure":
    """Validation accuracy over examples seen: a panel a task, a line an attention, seeds thin.

    Args:
        result: as `experiments.lra.report` wrote it.
    """
    from matplotlib.figure import Figure

    runs = result["runs"]
    tasks = [task for task in TASKS if any(run["task"] == task for run in runs)]
    n_columns = math.ceil(math.sqrt(len(tasks)))
    n_rows = math.ceil(len(tasks) / n_columns)
    figure = Figure(figsize=(1 + 4 * n_columns, 0.7 + 3 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    styles = styles_of(ATTENTIONS)
    lines = {}
    for task, axes in zip(tasks, panels, strict=False):
        for attention, title in ATTENTIONS.items():
            curves = [
                run["curve"] for run in runs if (run["task"], run["attention"]) == (task, attention)
            ]
            if not curves:
                continue
            look = {"color": styles[attention]["color"], "ls": styles[attention]["linestyle"]}
            millions = np.array(curves[0]["examples"]) / 1e6
            if len(curves) > 1:
                for curve in curves:
                    axes.plot(millions, curve["val_accuracy"], **look, lw=0.6, alpha=0.5)
            mean = np.mean([curve["val_accuracy"] for curve in curves], axis=0)
            (lines[title],) = axes.plot(millions, mean, **look, lw=1.6)
        other = result["references"][0]
        if task in other["accuracy"]:
            title = f"{other['model']}, on test"
            lines[title] = axes.axhline(other["accuracy"][task], color="#888888", ls=":", lw=1)
        axes.set_title(TASKS[task].title, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
    for axes in panels[len(tasks) :]:
        axes.set_axis_off()
    figure.supxlabel("training examples seen, millions", fontsize=10)
    figure.supylabel("validation accuracy, %", fontsize=10)
    figure.legend(
        list(lines.values()), list(lines), loc="outside upper center", ncols=4, fontsize=9
    )
    return figure

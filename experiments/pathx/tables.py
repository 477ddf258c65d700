"""The tables of a report on Path-X, from what experiments/pathx/report.py collected."""

from typing import Any

from evaluation.markdown import digits, markdown_table

Result = dict[str, Any]
Yardsticks = dict[str, dict[str, float]]
"""Accuracy in percent, by size and by what is known."""

TITLES = {
    "path64": "Path-64, packed",
    "pathx": "Path-X, packed",
    "pathx_dense": "Path-X, dense",
    "path64_butterfly": "Path-64, butterfly",
    "pathx_butterfly": "Path-X, butterfly",
    "path256_butterfly": "Path-256, butterfly",
}
"""packed: black pixels are padding, and left out."""

YARDSTICK_SIZES = {"64": "Path-64", "128": "Path-X", "256": "Path-256"}


def markdown(result: Result, yardsticks: Yardsticks) -> str:
    """The whole report."""
    parts = [
        "# Path-X and Path-256, Table 6 of the FlashAttention paper\n",
        "Test accuracy in percent, with 95% intervals (Wilson) at the size of the test split. Each "
        "stage begins with the best weights of the one before. The images are made by this "
        "project's generator.\n",
        accuracy_table(result),
        "## What each run took\n",
        "GPU-minutes are of training steps alone; minutes are those of the whole run with loading, "
        "compiling, validating and testing, where it was not interrupted.\n",
        runs_table(result),
    ]
    if yardsticks:
        parts += [
            "## What can be had without following a contour\n",
            "Boosted trees, and a small network, on what is seen at the two markers alone.\n",
            yardsticks_table(yardsticks),
        ]
    return "\n".join(parts)


def accuracy_table(result: Result) -> str:
    """The paper's rows and ours."""
    header = ["model", "seed", "tokens", "black pixels", "test accuracy", "the paper's"]
    paper = {row["model"]: row for row in result["paper"]}
    dense, sparse = paper["FlashAttention"], paper["block-sparse FlashAttention"]
    beside = {
        "pathx": dense["pathx"],
        "pathx_dense": dense["pathx"],
        "pathx_butterfly": sparse["pathx"],
        "path256_butterfly": sparse["path256"],
    }
    return markdown_table(
        header,
        [
            [
                TITLES[run["stage"]],
                str(run["seed"]),
                f"{run['tokens']:,}",
                "left out" if "left out" in run["padding"] else "tokens",
                f"{run['test_accuracy']:.1f} ({run['test_interval'][0]:.1f} to "
                f"{run['test_interval'][1]:.1f})",
                digits(beside.get(run["stage"]), ".1f"),
            ]
            for run in result["runs"]
        ],
    )


def runs_table(result: Result) -> str:
    """Steps, images and minutes of each stage."""
    header = ["stage", "seed", "attention", "positions", "parameters", "steps"]
    header += ["images seen", "of", "GPU-minutes of training", "minutes in all", "last on"]
    return markdown_table(
        header,
        [
            [
                TITLES[run["stage"]],
                str(run["seed"]),
                run["attention"],
                run["positions"],
                f"{run['parameters']:,}",
                f"{run['steps']:,}",
                f"{run['examples']:,}",
                f"{run['examples_in_sets']:,}",
                f"{run['minutes']:.1f}",
                digits(run["wall_minutes"], ".1f"),
                _last_on(run["starts"]),
            ]
            for run in result["runs"]
        ],
    )


def yardsticks_table(yardsticks: Yardsticks) -> str:
    """Accuracy of guesses from the markers' surroundings."""
    sizes = [size for size in YARDSTICK_SIZES if size in yardsticks]
    names = list(dict.fromkeys(name for size in sizes for name in yardsticks[size]))
    return markdown_table(
        ["the best guess from", *(YARDSTICK_SIZES[size] for size in sizes)],
        [[name, *(digits(yardsticks[size].get(name), ".1f") for size in sizes)] for name in names],
    )


def _last_on(starts: list[dict[str, Any]]) -> str:
    """The GPUs of the newest start; how many was not noted in the first runs."""
    if not starts:
        return "-"
    n, device = starts[-1].get("world_size", 1), starts[-1]["device"]
    return device if n == 1 else f"{n} x {device}"

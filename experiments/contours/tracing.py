"""Does a trained model follow the contour, or look at its ends?

    python -m experiments.contours.tracing out/pathx/pathx_dense --data out/data/lra \\
        --out docs/results/pathfinder_tracing.json

Where the markers lie and how contours leave them gives most labels away. So test images of label 1
are paired with those of label 0 that look alike there (matching.py). Of each pair, a model that
sees endpoint geometry alone orders the logits rightly half of the time, and one that traces nearly
always. Controls are classifiers of endpoint geometry (yardsticks.py, which must have run before);
of these, "held_out" had no part in the matching.
"""

from pathlib import Path

from experiments.contours.geometry import PREDICTIONS
from experiments.contours.matching import Tolerance
from experiments.harness import Command, write_and_print

command = Command(__name__)
command.add("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
command.add("--data", type=Path, default=Path("out/data/lra"), metavar="FOLDER")
command.add(
    "--add", type=Path, metavar="FILE",
    help="an earlier result, whose other runs are kept as they are",
)  # fmt: skip
command.add("--predictions", type=Path, default=PREDICTIONS, metavar="FOLDER")
command.add(
    "--tolerance", type=float, default=Tolerance.geometry, metavar="STROKES",
    help="how differently the ends of a pair may lie and point (default: %(default)s)",
)  # fmt: skip
command.add(
    "--caliper", type=float, default=Tolerance.log_odds, metavar="NATS",
    help="by how much the odds that geometry gives may differ (default: %(default)s)",
)  # fmt: skip
command.read(out="docs/results/pathfinder_tracing.json")

from argparse import Namespace
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from data.arrays import check_npy
from evaluation.results import read_result
from evaluation.statistics import wilson
from experiments.classifier_runs import read_run_config
from experiments.contours.geometry import read_endpoints
from experiments.contours.matching import match
from experiments.contours.yardsticks import read_predictions
from experiments.reports import mean_text, table
from training.classification.scoring import TEST_LOGITS
from training.metrics import read_metrics

CONTROL = "held_out"
MATCHED_BY = ("trees", "network")
CONFIDENCE = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Edges of the bins: the larger probability that a classifier of geometry gives a label."""


def measure(run: Path, data: Path, predictions: Path, tolerance: Tolerance) -> dict[str, Any]:
    """What a finished run does on its test split, on matched pairs and by how much geometry tells.

    `data` is the folder of the prepared tasks, `predictions` that of yardsticks.py.

    Raises:
        FileNotFoundError: the run is not finished, or geometry was not classified before.
        ValueError: run, data and predictions do not belong together, or nothing matches.
    """
    config = read_run_config(run)
    task = data / Path(config.data.path).name
    endpoints = read_endpoints(task, "test")
    geometry = read_predictions(predictions, task)
    labels = endpoints.labels
    log_odds = {"run": read_log_odds(run, labels)} | geometry
    matched_by = np.stack([geometry[name] for name in MATCHED_BY])
    by = matched_by.mean(axis=0)
    right = (by > 0) == labels
    sure = np.digitize(1 / (1 + np.exp(-np.abs(by))), CONFIDENCE[1:-1])
    pairs = match(endpoints, matched_by, tolerance)
    if not len(pairs):
        raise ValueError(
            f"{task}: no two test images are alike within {tolerance}; widen it with --tolerance "
            "or --caliper, or prepare more images"
        )
    return {
        "run": str(run),
        "task": task.name,
        "test_images": len(endpoints),
        "pairs": len(pairs),
        "on_pairs": {name: on_pairs(x, pairs) for name, x in log_odds.items()},
        "by_confidence": [
            {"confidence": [low, high], **accuracies(log_odds, labels, sure == number)}
            for number, (low, high) in enumerate(pairwise(CONFIDENCE))
        ],
        "where_geometry_is": {
            "right": accuracies(log_odds, labels, right),
            "wrong": accuracies(log_odds, labels, ~right),
        },
        "accuracy": accuracies(log_odds, labels),
    }


def read_log_odds(run: Path, labels: np.ndarray) -> np.ndarray:
    """(n,) float64 log-odds of label 1 that a run gave its test images.

    Raises:
        FileNotFoundError: there are no logits.
        ValueError: they are of other images than `labels`.
    """
    path = run / TEST_LOGITS
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: name a run that is finished")
    check_npy(path)
    logits = np.load(path, allow_pickle=False)
    if logits.shape != (len(labels), 2):
        raise ValueError(
            f"{path} has shape {logits.shape}, but the test split needs {(len(labels), 2)}: name "
            "the data that the run was trained on with --data"
        )
    found = float(np.mean(logits.argmax(-1) == labels))
    expected = read_metrics(run)[-1]["test_accuracy"]
    if abs(found - expected) > 0.5 / len(labels):
        raise ValueError(
            f"{path} scores {found:.2%} on this test split, but the run says {expected:.2%}: the "
            "images are others; name the data that the run was trained on with --data"
        )
    return logits[:, 1].astype(np.float64) - logits[:, 0]


def on_pairs(log_odds: np.ndarray, pairs: np.ndarray) -> dict[str, Any]:
    """Accuracy on the images of the pairs, and the share of pairs in the right order.

    Two equal logits count as half of a right order. Intervals are 95%; those of the accuracy treat
    pairs, not images, as what was drawn.
    """
    same, different = log_odds[pairs[:, 0]], log_odds[pairs[:, 1]]
    right = ((same > 0).astype(float) + (different <= 0)) / 2  # of each pair: 0, 1/2 or 1
    half = 1.96 * float(np.std(right)) / len(pairs) ** 0.5
    mean = float(np.mean(right))
    ordered = float(np.mean((same > different) + 0.5 * (same == different)))
    return {
        "accuracy": mean,
        "accuracy_interval": [mean - half, mean + half],
        "ordered": ordered,
        "ordered_interval": wilson(ordered, len(pairs)),
    }


def accuracies(
    log_odds: dict[str, np.ndarray], labels: np.ndarray, where: np.ndarray | slice = slice(None)
) -> dict[str, Any]:
    """Share of images with the right label by classifier, with 95% intervals; None of no image."""
    found = {}
    for name, x in log_odds.items():
        right = (x[where] > 0) == labels[where]
        share = float(np.mean(right)) if len(right) else None
        interval = None if share is None else wilson(share, len(right))
        found[name] = {"images": len(right), "accuracy": share, "interval": interval}
    return found


def classifiers_table(result: Mapping[str, Any]) -> str:
    """Each run on its pairs, and the classifiers of geometry on them, in percent."""
    return table(
        {
            "": row["run"] if name == "run" else f"geometry, {name}",
            "task": row["task"],
            "accuracy, %": f"{100 * row['accuracy'][name]['accuracy']:.1f}",
            "pairs": f"{row['pairs']:,}",
            "accuracy on pairs, %": _percent(row, name, "accuracy"),
            "pairs in order, %": _percent(row, name, "ordered"),
        }
        for row in result["rows"]
        for name in ("run", CONTROL, *MATCHED_BY)
    )


def runs_table(result: Mapping[str, Any]) -> str:
    """The pairs that each run puts in order, and those that the control does."""
    return table(
        {
            "run": Path(row["run"]).name,
            "accuracy, %": f"{100 * row['accuracy']['run']['accuracy']:.1f}",
            "pairs": f"{row['pairs']:,}",
            "pairs in order, %": _percent(row, "run", "ordered"),
            "by geometry alone, %": _percent(row, result["matching"]["control"], "ordered"),
        }
        for row in result["rows"]
    )


def _percent(row: dict[str, Any], classifier: str, share: str) -> str:
    """A share of the pairs or of their images, with its interval."""
    found = row["on_pairs"][classifier]
    return mean_text(found[share], found[f"{share}_interval"], 100)


@command.main
def main(args: Namespace) -> None:
    """Measure the runs, and add those of an earlier result."""
    tolerance = Tolerance(geometry=args.tolerance, log_odds=args.caliper)
    rows = [measure(run, args.data, args.predictions, tolerance) for run in args.runs]
    matching = {
        "tolerance_strokes": tolerance.geometry,
        "caliper_log_odds": tolerance.log_odds,
        "matched_by": list(MATCHED_BY),
        "control": CONTROL,
    }
    if args.add is not None:
        earlier, here = read_result(args.add, "matching", "rows"), {row["run"] for row in rows}
        if earlier["matching"] != matching:
            raise ValueError(
                f"{args.add} has pairs of another matching, {earlier['matching']}, than {matching}:"
                " give it the same --tolerance and --caliper, or leave --add out"
            )
        rows += [row for row in earlier["rows"] if row["run"] not in here]
    result = {"unit": "share", "matching": matching, "rows": rows}
    write_and_print(args.out, result, classifiers_table)

"""Test whether a trained model follows contours, or only looks at their ends.

    python -m experiments.contours.tracing out/pathx/pathx_dense --data out/data/lra \\
        --out docs/results/pathfinder_tracing.json

The positions of the markers, and the directions of the contours there, reveal most labels. So each
test image of label 1 is paired with one of label 0 that looks alike at the markers (matching.py). A
model that sees endpoint geometry only orders the logits of a pair correctly half of the time, and a
model that traces nearly always. Controls are classifiers of endpoint geometry: run baselines.py
first. The classifier "held_out" is not used for the matching.
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
    help="earlier result; its runs that are not measured now are kept",
)  # fmt: skip
command.add("--predictions", type=Path, default=PREDICTIONS, metavar="FOLDER")
command.add(
    "--tolerance", type=float, default=Tolerance.geometry, metavar="STROKES",
    help="largest difference of endpoint geometry within a pair (default: %(default)s)",
)  # fmt: skip
command.add(
    "--caliper", type=float, default=Tolerance.log_odds, metavar="NATS",
    help="largest difference of the geometry classifiers' log-odds (default: %(default)s)",
)  # fmt: skip
command.read(out="docs/results/pathfinder_tracing.json")

from argparse import Namespace
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from data.arrays import check_npy
from evaluation.markdown import dict_table
from evaluation.results import read_result
from evaluation.statistics import wilson
from experiments.classifier_runs import read_run_config
from experiments.contours.baselines import read_predictions
from experiments.contours.geometry import read_endpoints
from experiments.contours.matching import match
from experiments.reports import mean_text
from training.classification.scoring import TEST_LOGITS
from training.metrics import read_metrics

CONTROL = "held_out"
MATCHED_BY = ("trees", "network")
CONFIDENCE = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Bin edges of the geometry classifiers' confidence, the larger of their two probabilities."""


def measure(run: Path, data: Path, predictions: Path, tolerance: Tolerance) -> dict[str, Any]:
    """Score a finished run on its test split, on matched pairs, and by the confidence of geometry.

    Args:
        run: folder of the run.
        data: folder of the prepared tasks.
        predictions: folder that baselines.py wrote.
        tolerance: of the matching.

    Raises:
        FileNotFoundError: the run is not finished, or baselines.py has not run.
        ValueError: run, data and predictions do not belong together, or no images match.
    """
    config = read_run_config(run)
    task = data / Path(config.data.path).name
    endpoints = read_endpoints(task, "test")
    geometry = read_predictions(predictions, task)
    labels = endpoints.labels
    log_odds = {"run": read_log_odds(run, labels)} | geometry
    matched_by = np.stack([geometry[name] for name in MATCHED_BY])
    mean_log_odds = matched_by.mean(axis=0)
    right = (mean_log_odds > 0) == labels
    confidence = np.digitize(1 / (1 + np.exp(-np.abs(mean_log_odds))), CONFIDENCE[1:-1])
    pairs = match(endpoints, matched_by, tolerance)
    if not len(pairs):
        raise ValueError(
            f"{task}: no two test images match within {tolerance}. Try a larger --tolerance or "
            "--caliper, or prepare more images"
        )
    return {
        "run": str(run),
        "task": task.name,
        "test_images": len(endpoints),
        "pairs": len(pairs),
        "on_pairs": {name: on_pairs(x, pairs) for name, x in log_odds.items()},
        "by_confidence": [
            {"confidence": [low, high], **accuracies(log_odds, labels, confidence == number)}
            for number, (low, high) in enumerate(pairwise(CONFIDENCE))
        ],
        "where_geometry_is": {
            "right": accuracies(log_odds, labels, right),
            "wrong": accuracies(log_odds, labels, ~right),
        },
        "accuracy": accuracies(log_odds, labels),
    }


def read_log_odds(run: Path, labels: np.ndarray) -> np.ndarray:
    """Read a run's log-odds of label 1 on its test images, (n,) float64.

    Raises:
        FileNotFoundError: the run has no test logits.
        ValueError: the logits belong to other images than `labels`.
    """
    path = run / TEST_LOGITS
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Choose a finished run")
    check_npy(path)
    logits = np.load(path, allow_pickle=False)
    if logits.shape != (len(labels), 2):
        raise ValueError(
            f"{path} has shape {logits.shape}, but the test split needs {(len(labels), 2)}. Set "
            "--data to the data that the run was trained on"
        )
    accuracy = float(np.mean(logits.argmax(-1) == labels))
    expected = read_metrics(run)[-1]["test_accuracy"]
    if abs(accuracy - expected) > 0.5 / len(labels):
        raise ValueError(
            f"{path} scores {accuracy:.2%} on this test split, but the run recorded {expected:.2%} "
            "on other images. Set --data to the data that the run was trained on"
        )
    return logits[:, 1].astype(np.float64) - logits[:, 0]


def on_pairs(log_odds: np.ndarray, pairs: np.ndarray) -> dict[str, Any]:
    """Accuracy on the images of the pairs, and the share of pairs in the right order.

    Equal logits count as half of a right order. Intervals are 95%; for the accuracy, the pairs are
    the independent samples, not the images.
    """
    same, different = log_odds[pairs[:, 0]], log_odds[pairs[:, 1]]
    right = ((same > 0).astype(float) + (different <= 0)) / 2  # per pair: 0, 1/2 or 1
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
    log_odds: dict[str, np.ndarray], labels: np.ndarray, subset: np.ndarray | slice = slice(None)
) -> dict[str, Any]:
    """Accuracy of each classifier on a subset of images, with 95% intervals; None if empty."""
    result = {}
    for name, x in log_odds.items():
        right = (x[subset] > 0) == labels[subset]
        share = float(np.mean(right)) if len(right) else None
        interval = None if share is None else wilson(share, len(right))
        result[name] = {"images": len(right), "accuracy": share, "interval": interval}
    return result


def classifiers_table(result: Mapping[str, Any]) -> str:
    """Scores of each run, and of the geometry classifiers on its pairs, in percent."""
    return dict_table(
        {
            "classifier": row["run"] if name == "run" else f"geometry, {name}",
            "task": row["task"],
            "accuracy, %": f"{100 * row['accuracy'][name]['accuracy']:.1f}",
            "pairs": f"{row['pairs']:,}",
            "accuracy on pairs, %": _percent(row, name, "accuracy"),
            "pairs ordered correctly, %": _percent(row, name, "ordered"),
        }
        for row in result["rows"]
        for name in ("run", CONTROL, *MATCHED_BY)
    )


def runs_table(result: Mapping[str, Any]) -> str:
    """Pairs that each run orders correctly, and pairs that the control does."""
    return dict_table(
        {
            "run": Path(row["run"]).name,
            "accuracy, %": f"{100 * row['accuracy']['run']['accuracy']:.1f}",
            "pairs": f"{row['pairs']:,}",
            "pairs ordered correctly, %": _percent(row, "run", "ordered"),
            "pairs ordered by geometry only, %": _percent(
                row, result["matching"]["control"], "ordered"
            ),
        }
        for row in result["rows"]
    )


def _percent(row: dict[str, Any], classifier: str, share: str) -> str:
    """Format a share of the pairs or of their images, with its interval."""
    scores = row["on_pairs"][classifier]
    return mean_text(scores[share], scores[f"{share}_interval"], 100)


@command.main
def main(args: Namespace) -> None:
    """Measure the runs, and keep other runs of an earlier result."""
    tolerance = Tolerance(geometry=args.tolerance, log_odds=args.caliper)
    rows = [measure(run, args.data, args.predictions, tolerance) for run in args.runs]
    matching = {
        "tolerance_strokes": tolerance.geometry,
        "caliper_log_odds": tolerance.log_odds,
        "matched_by": list(MATCHED_BY),
        "control": CONTROL,
    }
    if args.add is not None:
        earlier, measured = read_result(args.add, "matching", "rows"), {row["run"] for row in rows}
        if earlier["matching"] != matching:
            raise ValueError(
                f"--add={args.add} has matching={earlier['matching']}, which must be {matching}. "
                "Set the same --tolerance and --caliper, or leave --add out"
            )
        rows += [row for row in earlier["rows"] if row["run"] not in measured]
    result = {"unit": "share", "matching": matching, "rows": rows}
    write_and_print(args.out, result, classifiers_table)

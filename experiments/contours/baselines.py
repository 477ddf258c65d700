"""Baselines on Pathfinder that do not trace: they see the two markers only.

    python -m experiments.contours.baselines --data out/data/lra \\
        --out docs/results/pathfinder_baselines.json --sizes 32 64 128 256

Gradient-boosted trees, and a small neural network that sees all features of the markers, are
trained on the training split and scored on the whole test split. Their predictions on each test
image are saved in --predictions for experiments.contours.tracing.
"""

from pathlib import Path

from data.lra.request import PATHFINDER_SIZES
from experiments.contours.geometry import PREDICTIONS
from experiments.harness import Command, write_and_print

TASKS = {size: task for task, size in PATHFINDER_SIZES.items()}

command = Command(__name__)
command.add(
    "--data", type=Path, nargs="+", default=[Path("out/data/lra")], metavar="FOLDER",
    help="folders of prepared tasks; the first that has a task is used",
)  # fmt: skip
command.add("--sizes", type=int, nargs="+", choices=TASKS, default=list(TASKS))
command.add(
    "--predictions", type=Path, default=PREDICTIONS, metavar="FOLDER",
    help="folder for the predictions on each test image (default: %(default)s)",
)  # fmt: skip
command.read(out="docs/results/pathfinder_baselines.json")

import io
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from data.arrays import load_npz
from data.files import write_atomically
from data.lra.store import Manifest
from evaluation.markdown import dict_table
from evaluation.statistics import wilson
from experiments.contours.geometry import ALL, KNOWLEDGE, Endpoints, features, read_endpoints, views
from experiments.reports import mean_text

NETWORK = "all endpoint geometry, by a network"

Predict = Callable[[np.ndarray], np.ndarray]  # (n, n_features) to (n,) log-odds of label 1


def measure(task: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Score all classifiers on the test split of a prepared task.

    Returns:
        The numbers of images, and the accuracies (shares) with 95% intervals by name; and the
        log-odds of label 1 on the test images, (n,), of "trees", "network" and "held_out". These
        three know the whole geometry; "held_out" is a second network.
    """
    train, val, test = (read_endpoints(task, split) for split in ("train", "val", "test"))
    accuracies: dict[str, float] = {}
    log_odds: dict[str, np.ndarray] = {}
    for name, columns in KNOWLEDGE.items():
        test_features = [_columns(view, columns) for view in views(test)]
        predict = fit_trees(_both(train, columns), _both(val, columns))
        predicted = np.stack([predict(x) for x in test_features])
        if name != "distance and one direction":  # the mean would know both directions
            predicted = predicted.mean(0, keepdims=True)
        accuracies[name] = float(np.mean((predicted > 0) == test.labels))
        if name == ALL:
            log_odds["trees"] = predicted[0]
            for seed, network in enumerate(("network", "held_out")):
                predict = fit_network(_both(train, columns), seed)
                log_odds[network] = np.mean([predict(x) for x in test_features], axis=0)
    accuracies[NETWORK] = float(np.mean((log_odds["network"] > 0) == test.labels))
    about = {
        "accuracies": accuracies,
        "intervals": {name: wilson(share, len(test)) for name, share in accuracies.items()},
        "train_images": len(train),
        "test_images": len(test),
    }
    return about, log_odds


def fit_trees(train: tuple[np.ndarray, np.ndarray], val: tuple[np.ndarray, np.ndarray]) -> Predict:
    """Fit gradient-boosted trees to (features, labels), with early stopping on validation data."""
    # imported here, because it would slow down --help
    from sklearn.ensemble import HistGradientBoostingClassifier

    options: dict[str, Any] = {"max_iter": 2000, "early_stopping": True, "random_state": 0}
    trees = HistGradientBoostingClassifier(**options)
    trees.fit(*train, X_val=val[0], y_val=val[1])
    return trees.decision_function


def fit_network(train: tuple[np.ndarray, np.ndarray], seed: int) -> Predict:
    """Fit a multilayer perceptron to (features, labels): smooth, unlike trees."""
    from sklearn.neural_network import MLPClassifier

    x, labels = train
    mean, std = x.mean(0), x.std(0)
    network = MLPClassifier(
        (128, 128),
        batch_size=min(1024, len(x)),  # pyright: ignore[reportArgumentType]
        learning_rate_init=2e-3,
        max_iter=100,
        early_stopping=True,  # on a tenth of the training data
        n_iter_no_change=5,
        random_state=seed,
    )
    network.fit((x - mean) / std, labels)

    def predict(x: np.ndarray) -> np.ndarray:
        probabilities = np.asarray(network.predict_proba((x - mean) / std))
        p = probabilities[:, 1].clip(1e-9, 1 - 1e-9)
        return np.log(p / (1 - p))

    return predict


def _columns(endpoints: Endpoints, names: Sequence[str]) -> np.ndarray:
    """Stack the named features, (N, n_features)."""
    by_name = features(endpoints)
    return np.stack([by_name[name] for name in names], axis=-1)


def _both(endpoints: Endpoints, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of 2 N examples: each image seen from either marker."""
    both_views = [_columns(view, names) for view in views(endpoints)]
    return np.concatenate(both_views), np.tile(endpoints.labels, 2)


def accuracies_table(result: dict[str, Any]) -> str:
    """Accuracies in percent, a column per size."""
    by_size = result["accuracies"].items()
    return dict_table(
        {"accuracy, %": name}
        | {
            f"{size} x {size}": mean_text(shares[name], result["intervals"][size][name], 100)
            for size, shares in by_size
        }
        for name in (*KNOWLEDGE, NETWORK)
    )


def write_predictions(folder: Path, task: Path, **logits: np.ndarray) -> Path:
    """Save log-odds of label 1 on a task's test images, (n,) per classifier, in FOLDER/TASK.npz."""
    file, path = io.BytesIO(), folder / f"{task.name}.npz"
    np.savez_compressed(file, allow_pickle=False, images=np.array(_test_sha256(task)), **logits)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, file.getvalue())
    return path


def read_predictions(folder: Path, task: Path) -> dict[str, np.ndarray]:
    """Read the log-odds that `write_predictions` saved for a task's test images.

    Raises:
        FileNotFoundError: the task has no predictions.
        ValueError: the predictions are for other images.
    """
    path = folder / f"{task.name}.npz"
    command = f"python -m experiments.contours.baselines --predictions {folder}"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Create it with {command}")
    arrays = load_npz(path)
    if str(arrays.pop("images")) != _test_sha256(task):
        raise ValueError(
            f"{path} has predictions for other test images than those of {task}. Recreate it with "
            f"{command}"
        )
    return arrays


def _test_sha256(task: Path) -> str:
    return Manifest.load(task).splits["test"].arrays["display_lists"].sha256


def find_task(folders: Sequence[Path], name: str) -> Path:
    """Find the first prepared task with this name in the folders.

    Raises:
        FileNotFoundError: no folder has it.
    """
    for folder in folders:
        if (folder / name).is_dir():
            return folder / name
    raise FileNotFoundError(
        f"--data={' '.join(map(str, folders))} has no folder {name}. Prepare it with "
        f"python -m scripts.prepare_lra {name} --out {folders[0]}"
    )


@command.main
def main(args: Namespace) -> None:
    """Measure the task of each size."""
    result: dict[str, Any] = {"unit": "share of test images"}
    for size in args.sizes:
        task = find_task(args.data, TASKS[size])
        about, logits = measure(task)
        for name, value in about.items():
            result.setdefault(name, {})[str(size)] = value
        write_predictions(args.predictions, task, **logits)
        print(f"measured {task}", flush=True)
    write_and_print(args.out, result, accuracies_table)

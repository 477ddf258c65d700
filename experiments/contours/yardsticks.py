"""Accuracy on Pathfinder without tracing: from what is seen at the two markers alone.

    python -m experiments.contours.yardsticks --data out/data/lra \\
        --out docs/results/pathfinder_yardsticks.json --sizes 32 64 128 256

Gradient-boosted trees, and a small neural network that sees everything at the markers, learn from
the training split and are scored on the whole test split. --predictions keeps what they say of each
test image, which experiments.contours.tracing needs.
"""

from pathlib import Path

from data.lra.request import PATHFINDER_SIZES
from experiments.contours.geometry import PREDICTIONS
from experiments.harness import Command, write_and_print

TASKS = {size: task for task, size in PATHFINDER_SIZES.items()}

command = Command(__name__)
command.add(
    "--data", type=Path, nargs="+", default=[Path("out/data/lra")], metavar="FOLDER",
    help="folders with prepared tasks; the first that has a task counts",
)  # fmt: skip
command.add("--sizes", type=int, nargs="+", choices=TASKS, default=list(TASKS))
command.add(
    "--predictions", type=Path, default=PREDICTIONS, metavar="FOLDER",
    help="where what is said of each test image goes (default: %(default)s)",
)  # fmt: skip
command.read(out="docs/results/pathfinder_yardsticks.json")

import io
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from data.arrays import load_npz
from data.files import write_atomically
from data.lra.store import Manifest
from evaluation.statistics import wilson
from experiments.contours.geometry import ALL, KNOWLEDGE, Endpoints, features, read_endpoints, views
from experiments.reports import mean_text, table

NETWORK = "all endpoint geometry, by a network"

Predict = Callable[[np.ndarray], np.ndarray]  # (n, n_features) to (n,) log-odds of label 1


def measure(task: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Score all classifiers on the test split of a prepared task.

    Returns:
        Numbers of images, and by name the accuracies (shares) with 95% intervals; and (n,) log-odds
        of label 1 of the test images by "trees", "network" and "held_out", a second network, all of
        which know the whole geometry.
    """
    train, val, test = (read_endpoints(task, split) for split in ("train", "val", "test"))
    accuracies: dict[str, float] = {}
    kept: dict[str, np.ndarray] = {}
    for name, columns in KNOWLEDGE.items():
        seen = [_columns(view, columns) for view in views(test)]
        predict = fit_trees(_both(train, columns), _both(val, columns))
        found = np.stack([predict(x) for x in seen])
        if name != "distance and one direction":  # both together would be both directions
            found = found.mean(0, keepdims=True)
        accuracies[name] = float(np.mean((found > 0) == test.labels))
        if name == ALL:
            kept["trees"] = found[0]
            for seed, network in enumerate(("network", "held_out")):
                predict = fit_network(_both(train, columns), seed)
                kept[network] = np.mean([predict(x) for x in seen], axis=0)
    accuracies[NETWORK] = float(np.mean((kept["network"] > 0) == test.labels))
    about = {
        "accuracies": accuracies,
        "intervals": {name: wilson(share, len(test)) for name, share in accuracies.items()},
        "train_images": len(train),
        "test_images": len(test),
    }
    return about, kept


def fit_trees(train: tuple[np.ndarray, np.ndarray], val: tuple[np.ndarray, np.ndarray]) -> Predict:
    """Gradient-boosted trees on (features, labels), as many as serve the validation data best."""
    # slow to load: --help should not wait for it
    from sklearn.ensemble import HistGradientBoostingClassifier

    how: dict[str, Any] = {"max_iter": 2000, "early_stopping": True, "random_state": 0}
    trees = HistGradientBoostingClassifier(**how)
    trees.fit(*train, X_val=val[0], y_val=val[1])
    return trees.decision_function


def fit_network(train: tuple[np.ndarray, np.ndarray], seed: int) -> Predict:
    """A multilayer perceptron on (features, labels): smooth, where trees have steps."""
    from sklearn.neural_network import MLPClassifier

    x, labels = train
    middle, spread = x.mean(0), x.std(0)
    network = MLPClassifier(
        (128, 128),
        batch_size=min(1024, len(x)),  # pyright: ignore[reportArgumentType]
        learning_rate_init=2e-3,
        max_iter=100,
        early_stopping=True,  # on a tenth of the training data
        n_iter_no_change=5,
        random_state=seed,
    )
    network.fit((x - middle) / spread, labels)

    def predict(x: np.ndarray) -> np.ndarray:
        shares = np.asarray(network.predict_proba((x - middle) / spread))
        share = shares[:, 1].clip(1e-9, 1 - 1e-9)
        return np.log(share / (1 - share))

    return predict


def _columns(endpoints: Endpoints, names: Sequence[str]) -> np.ndarray:
    """(N, n_features) of the named features."""
    found = features(endpoints)
    return np.stack([found[name] for name in names], axis=-1)


def _both(endpoints: Endpoints, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of 2 N examples: each image from either marker."""
    seen = [_columns(view, names) for view in views(endpoints)]
    return np.concatenate(seen), np.tile(endpoints.labels, 2)


def accuracies_table(result: dict[str, Any]) -> str:
    """Accuracies in percent, a column a size."""
    of_sizes = result["accuracies"].items()
    return table(
        {"accuracy, %": name}
        | {
            f"{size} x {size}": mean_text(shares[name], result["intervals"][size][name], 100)
            for size, shares in of_sizes
        }
        for name in (*KNOWLEDGE, NETWORK)
    )


def write_predictions(folder: Path, task: Path, **logits: np.ndarray) -> Path:
    """Keep (n,) log-odds of label 1, by classifier, of a task's test images as FOLDER/TASK.npz."""
    file, path = io.BytesIO(), folder / f"{task.name}.npz"
    np.savez_compressed(file, allow_pickle=False, images=np.array(_test_sha256(task)), **logits)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, file.getvalue())
    return path


def read_predictions(folder: Path, task: Path) -> dict[str, np.ndarray]:
    """The log-odds that `write_predictions` kept of a task's test images.

    Raises:
        FileNotFoundError: nothing was kept of it.
        ValueError: it was of other images.
    """
    path = folder / f"{task.name}.npz"
    command = f"python -m experiments.contours.yardsticks --predictions {folder}"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: make it with {command}")
    found = load_npz(path)
    if str(found.pop("images")) != _test_sha256(task):
        raise ValueError(
            f"{path} is of other test images than {task} holds: make it anew with {command}"
        )
    return found


def _test_sha256(task: Path) -> str:
    return Manifest.load(task).splits["test"].arrays["display_lists"].sha256


def find_task(folders: Sequence[Path], name: str) -> Path:
    """The first of the folders' prepared tasks of this name.

    Raises:
        FileNotFoundError: none has it.
    """
    for folder in folders:
        if (folder / name).is_dir():
            return folder / name
    raise FileNotFoundError(
        f"{' and '.join(map(str, folders))} hold no {name}: prepare it with "
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

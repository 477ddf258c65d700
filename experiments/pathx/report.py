"""The paper's Table 6 beside ours: accuracy on Path-X and Path-256, in JSON, Markdown, a picture.

python -m experiments.pathx.report docs/results/pathx.json    # Markdown and picture anew
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.command_line import command_parser, errors_as_sentences
from data.files import write_atomically
from data.lra.store import open_split
from evaluation.results import add_runs, read_result, write_result
from evaluation.statistics import wilson
from evaluation.style import save
from experiments.classifier_runs import is_finished, read_run_config
from experiments.lra.runs import padding_of, positions_of
from experiments.pathx.plots import draw
from experiments.pathx.stages import BEFORE, run_folder
from experiments.pathx.tables import markdown
from model.classifier import Classifier
from training.config import RUN_CONFIG
from training.environment import read_starts
from training.metrics import read_metrics

PAPER = (
    ("FlashAttention", 61.4, None),
    ("block-sparse FlashAttention", 56.0, 63.1),
)
"""arXiv 2205.14135, Table 6: Path-X and Path-256, test accuracy in percent; None: at chance or
out of memory, as were all other models there."""

YARDSTICKS = "pathfinder_yardsticks.json"
_NAME = re.compile(rf"(?P<stage>{'|'.join(BEFORE)})_seed(?P<seed>\d+)")


def write_report(out: Path, results: Path, others: Sequence[Path] = ()) -> Path:
    """Report on all finished stages; prints the tables.

    Args:
        out: folder of the runs, as `experiments.pathx.stages.make_runs` names them.
        results: pathx.json goes there.
        others: reports whose runs belong into this one where `out` has none of their name.

    Returns:
        The JSON file; its Markdown and picture are beside it.

    Raises:
        ValueError: nothing is finished.
    """
    runs = add_runs(finished_runs(out), others, _order)
    if not runs:
        raise ValueError(f"{out} holds no finished stage to report on")
    path = results / "pathx.json"
    write_result(
        path,
        {
            "unit": "percent",  # of all accuracies here
            "paper": [{"model": m, "pathx": x, "path256": y} for m, x, y in PAPER],
            "runs": runs,
        },
    )
    redraw(path)
    return path


def redraw(path: Path) -> None:
    """Write the Markdown and the picture anew beside the JSON, and print the tables.

    What can be had without following a contour is told, too, where experiments.contours.yardsticks
    left it beside the JSON.
    """
    result = read_result(path, "paper", "runs")
    text = markdown(result, read_yardsticks(path.parent))
    write_atomically(path.with_suffix(".md"), text.encode())
    save(draw(result), path.with_suffix(".png"))
    print(text)
    print(f"wrote {path.with_suffix('.md')} and its picture")


def read_yardsticks(results: Path) -> dict[str, dict[str, float]]:
    """Accuracies in percent by size and by what is known; empty where they were not measured."""
    path = results / YARDSTICKS
    if not path.exists():
        return {}
    return {
        size: {name: 100 * share for name, share in found.items()}
        for size, found in read_result(path, "accuracies")["accuracies"].items()
    }


def finished_runs(out: Path) -> list[dict[str, Any]]:
    """All finished stages in a folder."""
    return [
        describe(name["stage"], int(name["seed"]), folder)
        for folder in out.glob("*_seed*")
        if (name := _NAME.fullmatch(folder.name))
        and (folder / RUN_CONFIG).exists()
        and is_finished(folder)
    ]


def _order(run: dict[str, Any]) -> tuple[int, int]:
    return list(BEFORE).index(run["stage"]), run["seed"]


def describe(stage: str, seed: int, folder: Path) -> dict[str, Any]:
    """What was trained, what it took and what came of it, as JSON can hold it."""
    config = read_run_config(folder)
    model, data = config.model, config.data
    records = read_metrics(folder)
    last = records[-1]
    accuracy, n = last["test_accuracy"], last["test_examples"]
    evaluations = [r for r in records if "val_accuracy" in r]
    before = BEFORE[stage]
    assert model.grid_width is not None
    return {
        "stage": stage,
        "seed": seed,
        "size": model.grid_width,
        "tokens": model.context_length,
        "attention": model.mask.pattern,
        "density": model.mask.density(model.context_length, causal=False),
        "positions": positions_of(config),
        "padding": padding_of(config),
        "parameters": Classifier(model).n_params(),
        "augment": data.augment,
        "batch_size": config.optim.batch_size,
        "lr": config.optim.lr,
        "steps": last["step"],
        "examples": last["examples"],
        "examples_in_sets": sum(len(open_split(path, "train")) for path in data.training_paths),
        "minutes": 60 * last["gpu_hours"],
        "wall_minutes": last["wall_s"] / 60 if "wall_s" in last else None,
        "test_accuracy": 100 * accuracy,
        "test_interval": [100 * share for share in wilson(accuracy, n)],
        "test_examples": n,
        "best_step": last["best_step"],
        "best_val_accuracy": 100 * last["best_val_accuracy"],
        "begins_with": None if before is None else run_folder(folder.parent, before, seed).name,
        "starts": read_starts(folder),
        "curve": {
            "examples": [r["examples"] for r in evaluations],
            "val_accuracy": [100 * r["val_accuracy"] for r in evaluations],
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = command_parser(__doc__, __spec__)
    parser.add_argument("result", type=Path, metavar="FILE", help="a pathx.json")
    redraw(parser.parse_args(argv).result)


if __name__ == "__main__":
    with errors_as_sentences():
        main()

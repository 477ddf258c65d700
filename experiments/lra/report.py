"""The paper's Table 3 beside ours: accuracy on Long Range Arena, in JSON, Markdown and a picture.

python -m experiments.lra.report docs/results/lra.json    # Markdown and picture anew
"""

from experiments.reports import report_command

command = report_command(__name__)  # before PyTorch is loaded, which takes seconds

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from data.files import write_atomically
from data.lra.listops import yardsticks
from data.lra.store import MANIFEST, Sequences, open_split
from evaluation.results import Row, read_result, write_result
from evaluation.runs import HOW, check_settings
from evaluation.statistics import Estimate, paired_half_width, widen, wilson
from experiments.classifier_runs import (
    changes_of,
    describe,
    finished_folders,
    is_finished,
    read_run_config,
)
from experiments.lra.tables import draw, markdown
from experiments.lra.tasks import ATTENTIONS, BENCHMARK, TASKS, config_path, suffix_of
from experiments.reports import publish
from experiments.results import add_runs
from training.classification.config import ClassifyConfig
from training.metrics import read_metrics

PAPER = (
    ("Transformer (the paper's)", (36.0, 63.6, 81.6, 42.3, 72.7), 59.3, None),
    ("FlashAttention (the paper's)", (37.6, 63.9, 81.4, 43.5, 72.7), 59.8, 2.4),
    ("block-sparse FlashAttention (the paper's)", (37.0, 63.0, 81.3, 43.6, 73.3), 59.6, 2.8),
)
"""arXiv 2205.14135, Table 3: test accuracy in percent by task, the average that it prints, and how
many times faster than its Transformer, the geometric mean over the tasks."""

AMOS = (
    ("Transformer, rotary (Amos et al.)", (47.90, 79.08, 82.31, 75.04, 76.64), 72.19, None),
    ("the same, pretrained (Amos et al.)", (61.49, 91.02, 91.57, 86.04, 94.16), 84.86, None),
)
"""arXiv 2310.02980, Transformers with rotary positions, from labels alone and after pretraining
on hidden tokens; the averages are ours, as theirs have Path-X in them."""

REFERENCES = {"paper": PAPER, "rotary": AMOS, "pretrained": AMOS}

JOBS_PER_GPU = "jobs_per_gpu.json"
"""File in the folder of a run: how many runs shared its GPU, at most."""

SETTINGS = (
    *("steps", "examples", "examples_in_all", "test_examples", "config"),
    *("context_length", "documents", "parameters", "positions", "padding", "changes"),
    *("block_size", "density", "batch_size", "lr"),
)
"""What all seeds of a task with an attention share, of the entries that `describe_run` gives."""


def write_report(
    out: Path, recipe: str, data: Path, results: Path, others: Sequence[Path] = ()
) -> None:
    """Report on all finished runs of a recipe in `out`: lra.json or lra_RECIPE.json in `results`.

    The speeds and the yardsticks of Pathfinder come from `results`, too, where they were measured;
    other yardsticks are of the prepared tasks in `data`. Runs of the reports `others` are told of
    where `out` has none of their name.

    Raises:
        ValueError: nothing is finished, runs of one name differ in more than their seed, the run
            that one started with is gone, or a report is of another recipe.
    """
    runs = with_others(finished_runs(out, recipe), others, recipe)
    if not runs:
        raise ValueError(f"{out} holds no finished run of the recipe {recipe} to report on")
    result = {
        "recipe": recipe,
        "unit": "percent",  # of all accuracies here
        "references": [
            {
                "model": model,
                "accuracy": dict(zip(BENCHMARK, accuracies, strict=True)),
                "average": average,
                "speedup": speedup,
            }
            for model, accuracies, average, speedup in REFERENCES[recipe]
        ],
        "rows": summarize(runs),
        "yardsticks": {
            "listops": listops_yardsticks(data / TASKS["listops"].folder),
            "pathfinder": pathfinder_yardsticks(results / "pathfinder_yardsticks.json"),
        },
        # the times are of the paper's recipe
        "speed": read_speed(results / "lra_speed.json") if recipe == "paper" else None,
        "runs": runs,
    }
    path = results / f"lra{suffix_of(recipe)}.json"
    write_result(path, result)
    redraw(path)


def redraw(path: Path) -> None:
    """Write the Markdown and the picture anew beside the JSON, and print the tables."""
    result = read_result(path, "recipe", "references", "rows", "runs", "yardsticks", "speed")
    publish(path, markdown(result), draw(result))


def finished_runs(out: Path, recipe: str) -> list[Row]:
    """All finished runs of a recipe in a folder, in the order of tasks, attentions and seeds.

    Raises:
        ValueError: two runs that differ in their seed by name differ in more.
    """
    name = re.compile(rf"({'|'.join(TASKS)}){suffix_of(recipe)}_({'|'.join(ATTENTIONS)})_seed\d+")
    first: dict[tuple[str, str], ClassifyConfig] = {}
    runs = []
    for folder in sorted(finished_folders(out)):
        if found := name.fullmatch(folder.name):
            task, attention = found.groups()
            config = read_run_config(folder)
            of_first = first.setdefault((task, attention), config)
            check_settings(folder, config, of_first, may_differ=(*HOW, "run.seed"))
            about = describe_run(folder, config)
            path = str(config_path(task, recipe))
            runs.append({"task": task, "attention": attention, **about, "config": path})
    return sorted(runs, key=_order)


def with_others(runs: Sequence[Row], reports: Sequence[Path], recipe: str) -> list[Row]:
    """Runs and those of other reports that are not among them, in the order of `finished_runs`.

    Raises:
        ValueError: a report is of another recipe, or seeds differ in SETTINGS.
    """
    for path in reports:
        found = read_result(path, "recipe")["recipe"]
        if found != recipe:
            raise ValueError(f"--add {path}: it is of the recipe {found}, and this one of {recipe}")
    every = add_runs(runs, reports, _order)
    first: dict[tuple[str, str], Row] = {}
    for run in every:
        of_first = first.setdefault((run["task"], run["attention"]), run)
        for name in SETTINGS:
            if run[name] != of_first[name]:
                raise ValueError(
                    f"--add: of {run['task']} with {run['attention']} attention, seed "
                    f"{run['seed']} has {name}={run[name]}, and seed {of_first['seed']} "
                    f"{of_first[name]}: train both alike, or leave the report with one of them out"
                )
    return every


def _order(run: Row) -> tuple[int, int, int]:
    return list(TASKS).index(run["task"]), list(ATTENTIONS).index(run["attention"]), run["seed"]


def describe_run(folder: Path, config: ClassifyConfig) -> Row:
    """Settings, cost and accuracy of a run; the run that it started with counts for the cost."""
    last, model = read_metrics(folder)[-1], config.model
    ends, before = [last], None
    if config.run.init_from is not None:
        origin = folder.parent / Path(config.run.init_from).name
        if not is_finished(origin):
            raise ValueError(
                f"{folder} started with the weights of {origin}, which holds no finished run: what "
                "it took belongs in the report, so put it back"
            )
        ends, before = [last, read_metrics(origin)[-1]], read_run_config(origin)
    return {
        **describe(folder),
        "test_loss": last["test_loss"],
        "examples_in_all": sum(end["examples"] for end in ends),
        "minutes": 60 * sum(end["gpu_hours"] for end in ends),
        "jobs_per_gpu": jobs_per_gpu(folder),
        "context_length": model.context_length,
        "documents": model.documents,
        "changes": changes_of(config, before),
        "block_size": None if model.mask.pattern == "dense" else model.mask.block_size,
        "dtype": config.run.dtype,
    }


def jobs_per_gpu(folder: Path) -> int | None:
    """How many runs shared the GPU of a run, at most; None where it was not noted."""
    path = folder / JOBS_PER_GPU
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def note_sharing(folder: Path, most: int) -> None:
    """Note in the folder of a run that `most` runs share its GPU, or more, as noted before."""
    folder.mkdir(parents=True, exist_ok=True)
    most = max(most, jobs_per_gpu(folder) or 1)
    write_atomically(folder / JOBS_PER_GPU, f"{most}\n".encode())


def summarize(runs: Sequence[Row]) -> list[Row]:
    """For each task and attention the mean over seeds, and 95% intervals.

    `test_interval` is Wilson's, of the mean at the size of the test split: how far other examples
    might move it. `seed_interval` is Student's t over the seeds, None for one seed. `interval` adds
    both half-widths as independent errors, on each side. `runs` are those of `with_others`.
    """
    rows = []
    for (task, attention), group in groupby(runs, lambda run: (run["task"], run["attention"])):
        seeds = list(group)
        each = {name: [run[name] for run in seeds] for name in seeds[0]}
        mean = fmean(each["test_accuracy"])
        low, high = (100 * share for share in wilson(mean / 100, seeds[0]["test_examples"]))
        over_seeds = paired_half_width(each["test_accuracy"])
        both = widen(Estimate(mean=mean, low=low, high=high), over_seeds)
        rows.append(
            {
                "task": task,
                "attention": attention,
                "seeds": each["seed"],
                "test_accuracy": mean,
                "each": each["test_accuracy"],
                "interval": np.clip((both.low, both.high), 0, 100).tolist(),
                "test_interval": [low, high],
                "seed_interval": None
                if over_seeds is None
                else np.clip((mean - over_seeds, mean + over_seeds), 0, 100).tolist(),
                "minutes": fmean(each["minutes"]),
                **{name: each[name] for name in ("best_val_accuracy", "best_step", "jobs_per_gpu")},
                **{name: seeds[0][name] for name in SETTINGS},
            }
        )
    return rows


def listops_yardsticks(folder: Path) -> dict[str, float] | None:
    """What readers of parts of a formula score on its test split, percent; None without data."""
    if not (folder / MANIFEST).exists():
        return None
    train, test = (open_split(folder, split) for split in ("train", "test"))
    assert isinstance(train, Sequences) and isinstance(test, Sequences)
    return yardsticks(train, test)


def pathfinder_yardsticks(path: Path) -> dict[str, float] | None:
    """What classifiers of the markers score at 32 x 32, percent; None where not measured."""
    shares = read_result(path, "accuracies")["accuracies"].get("32") if path.exists() else None
    return shares and {name: 100 * share for name, share in shares.items()}


def read_speed(path: Path) -> dict[str, Any] | None:
    """What `experiments.lra.speed` measured; None where it did not."""
    if not path.exists():
        return None
    speed = read_result(path, "rows", "geometric_means")
    device = speed["environment"]["device"]
    return {"device": device, **{name: speed[name] for name in ("geometric_means", "rows")}}


command.main(lambda args: redraw(args.result))

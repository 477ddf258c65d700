"""Table 3 of the paper and ours: accuracy on Long Range Arena, as JSON, Markdown and a picture.

python -m experiments.lra.report docs/results/lra.json    # rewrite Markdown and picture
"""

from experiments.reports import report_command

command = report_command(__name__)  # before PyTorch is imported, which takes seconds

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from data.lra import listops
from data.lra.store import MANIFEST, Sequences, open_split
from evaluation.results import Row, read_result, write_result
from evaluation.runs import HOW, check_settings, jobs_per_gpu
from evaluation.statistics import Estimate, paired_half_width, widen, wilson
from experiments.classifier_runs import (
    changes_of,
    describe,
    finished_folders,
    is_finished,
    read_run_config,
)
from experiments.lra import shared_citations
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
"""arXiv 2205.14135, Table 3: test accuracy in percent by task, the printed average, and the speedup
over its Transformer, a geometric mean over the tasks."""

AMOS = (
    ("Transformer, rotary (Amos et al.)", (47.90, 79.08, 82.31, 75.04, 76.64), 72.19, None),
    ("the same, pretrained (Amos et al.)", (61.49, 91.02, 91.57, 86.04, 94.16), 84.86, None),
)
"""arXiv 2310.02980: Transformers with rotary positions, trained on labels only and after
pretraining on hidden tokens. The averages are computed here, because theirs include Path-X."""

REFERENCES = {"paper": PAPER, "rotary": AMOS, "pretrained": AMOS}

"""File in the folder of a run: the largest number of runs that shared its GPU."""

SETTINGS = (
    *("steps", "examples", "examples_in_all", "test_examples", "config"),
    *("context_length", "documents", "parameters", "positions", "padding", "changes"),
    *("block_size", "density", "batch_size", "lr"),
)
"""Entries of `describe_run` that all seeds of a task with an attention share."""


def write_report(
    out: Path, recipe: str, data: Path, results: Path, others: Sequence[Path] = ()
) -> None:
    """Write lra.json or lra_RECIPE.json into `results`, on all finished runs of a recipe in `out`.

    The speeds and the baselines of Pathfinder are also read from `results`, if they were measured.
    Other baselines use the prepared tasks in `data`. Runs of the reports `others` are added if
    `out` has no run of their name.

    Raises:
        ValueError: no run is finished, runs of one name differ in more than their seed, the run
            that another one started from is missing, or a report has another recipe.
    """
    runs = with_others(finished_runs(out, recipe), others, recipe)
    if not runs:
        raise ValueError(f"{out} has no finished run of the recipe {recipe} to report on")
    result = {
        "recipe": recipe,
        "unit": "percent",  # unit of all accuracies
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
        "baselines": {
            "listops": baselines_of(data / TASKS["listops"].folder, listops.baselines),
            "pathfinder": pathfinder_baselines(results / "pathfinder_baselines.json"),
            "aclsum": baselines_of(data / TASKS["aclsum"].folder, shared_citations.baselines),
        },
        # times were measured with the paper's recipe only
        "speed": read_speed(results / "lra_speed.json") if recipe == "paper" else None,
        "runs": runs,
    }
    path = results / f"lra{suffix_of(recipe)}.json"
    write_result(path, result)
    redraw(path)


def redraw(path: Path) -> None:
    """Rewrite the Markdown and the picture next to the JSON, and print the tables."""
    result = read_result(path, "recipe", "references", "rows", "runs", "baselines", "speed")
    publish(path, markdown(result), draw(result))


def finished_runs(out: Path, recipe: str) -> list[Row]:
    """Find all finished runs of a recipe in a folder, in the order of tasks, attentions and seeds.

    Raises:
        ValueError: two seeds of a run differ in other settings.
    """
    name = re.compile(rf"({'|'.join(TASKS)}){suffix_of(recipe)}_({'|'.join(ATTENTIONS)})_seed\d+")
    first: dict[tuple[str, str], ClassifyConfig] = {}
    runs = []
    for folder in sorted(finished_folders(out)):
        if match := name.fullmatch(folder.name):
            task, attention = match.groups()
            config = read_run_config(folder)
            first_config = first.setdefault((task, attention), config)
            check_settings(folder, config, first_config, may_differ=(*HOW, "run.seed"))
            about = describe_run(folder, config)
            path = str(config_path(task, recipe))
            runs.append({"task": task, "attention": attention, **about, "config": path})
    return sorted(runs, key=_order)


def with_others(runs: Sequence[Row], reports: Sequence[Path], recipe: str) -> list[Row]:
    """Merge runs with those of other reports, in the order of `finished_runs`.

    Raises:
        ValueError: a report has another recipe, or seeds differ in SETTINGS.
    """
    for path in reports:
        other = read_result(path, "recipe")["recipe"]
        if other != recipe:
            raise ValueError(f"--add={path} has recipe={other}, which must be {recipe}")
    all_runs = add_runs(runs, reports, _order)
    first: dict[tuple[str, str], Row] = {}
    for run in all_runs:
        first_run = first.setdefault((run["task"], run["attention"]), run)
        for name in SETTINGS:
            if run[name] != first_run[name]:
                raise ValueError(
                    f"--add: {run['task']} with {run['attention']} attention: seed {run['seed']} "
                    f"has {name}={run[name]}, but seed {first_run['seed']} has {first_run[name]}. "
                    "Train both with the same settings, or leave one report out"
                )
    return all_runs


def _order(run: Row) -> tuple[int, int, int]:
    return list(TASKS).index(run["task"]), list(ATTENTIONS).index(run["attention"]), run["seed"]


def describe_run(folder: Path, config: ClassifyConfig) -> Row:
    """Settings, accuracy and cost of a run, including the cost of the run that it started from."""
    last, model = read_metrics(folder)[-1], config.model
    ends, before = [last], None
    if config.run.init_from is not None:
        origin = folder.parent / Path(config.run.init_from).name
        if not is_finished(origin):
            raise ValueError(
                f"{folder} started from the weights of {origin}, which has no finished run. "
                "Restore that run, because the report needs its cost"
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


def summarize(runs: Sequence[Row]) -> list[Row]:
    """Mean over seeds for each task and attention, with 95% intervals.

    `test_interval` is Wilson's interval of the mean at the size of the test split, the uncertainty
    over test examples. `seed_interval` is Student's t over the seeds, None for one seed. `interval`
    combines both half-widths as independent errors. `runs` are those of `with_others`.
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


def baselines_of(
    folder: Path, baselines: Callable[[Sequences, Sequences], dict[str, float]]
) -> dict[str, float] | None:
    """Test accuracy of baselines fit on the train split, percent; None without data."""
    if not (folder / MANIFEST).exists():
        return None
    train, test = (open_split(folder, split) for split in ("train", "test"))
    assert isinstance(train, Sequences) and isinstance(test, Sequences)
    return baselines(train, test)


def pathfinder_baselines(path: Path) -> dict[str, float] | None:
    """Test accuracy of baselines that see the markers at 32 x 32, percent; None if not measured."""
    shares = read_result(path, "accuracies")["accuracies"].get("32") if path.exists() else None
    return shares and {name: 100 * share for name, share in shares.items()}


def read_speed(path: Path) -> dict[str, Any] | None:
    """Read the result of `experiments.lra.speed`; None if there is none."""
    if not path.exists():
        return None
    speed = read_result(path, "rows", "geometric_means")
    device = speed["environment"]["device"]
    return {"device": device, **{name: speed[name] for name in ("geometric_means", "rows")}}


command.main(lambda args: redraw(args.result))

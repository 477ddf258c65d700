"""The paper's Table 3 beside ours: accuracy on Long Range Arena, in JSON, Markdown and a picture.

python -m scripts.lra_report docs/results/lra.json    # Markdown and picture anew
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from configs import RUN_CONFIG, ClassifyConfig
from configs.command_line import errors_as_sentences
from data.files import write_atomically
from data.lra.listops_yardsticks import yardsticks
from data.lra.store import MANIFEST, Sequences, open_split
from model.classifier import Classifier
from scripts.classifier_runs import is_finished, read_run_config
from scripts.evaluation_plots import save
from scripts.evaluation_statistics import Estimate, paired_half_width, widen
from scripts.lra_plan import (
    ATTENTIONS,
    BENCHMARK,
    TASKS,
    RunName,
    config_path,
    parse_name,
)
from scripts.lra_plots import draw
from scripts.lra_tables import markdown
from scripts.results import read_result, write_result
from scripts.runs import HOW, check_settings
from training.environment import read_starts
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
"""arXiv 2310.02980, the same of its Transformers with rotary positions, from labels alone and after
self-pretraining on hidden tokens; the averages are ours, as theirs have Path-X in them."""

REFERENCES = {"paper": PAPER, "rotary": AMOS, "pretrained": AMOS}

JOBS_PER_GPU = "jobs_per_gpu.json"
"""File in the folder of a run: how many runs shared its GPU, at most."""

PATHFINDER_SIZE = "32"


def note_sharing(folder: Path, jobs_per_gpu: int) -> None:
    """Note in the folder of a run that so many runs share its GPU; the most is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    most = max(jobs_per_gpu, _sharing(folder) or 1)
    write_atomically(folder / JOBS_PER_GPU, f"{most}\n".encode())


def write_report(out: Path, recipe: str, data: Path, results: Path) -> Path:
    """Report on all finished runs of a recipe; prints the tables.

    Args:
        out: folder of the runs, as `scripts.lra_plan.make_jobs` names them.
        recipe: of scripts.lra_plan.RECIPES.
        data: folder of the prepared tasks, of which yardsticks are taken.
        results: folder of the results: lra.json, or lra_RECIPE.json, goes there, and from there
            come the speeds and the yardsticks of Pathfinder, where they were measured.

    Returns:
        The JSON file; its Markdown and picture are beside it.

    Raises:
        ValueError: nothing is finished, runs of one name differ in more than their seed, or the
            run that one started with is gone.
    """
    runs = finished_runs(out, recipe)
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
    path = results / ("lra.json" if recipe == "paper" else f"lra_{recipe}.json")
    write_result(path, result)
    redraw(path)
    return path


def redraw(path: Path) -> None:
    """Write the Markdown and the picture anew beside the JSON, and print the tables."""
    result = read_result(path, "recipe", "references", "rows", "runs", "yardsticks", "speed")
    text = markdown(result)
    write_atomically(path.with_suffix(".md"), text.encode())
    save(draw(result), path.with_suffix(".png"))
    print(text)
    print(f"wrote {path.with_suffix('.md')} and its picture")


def finished_runs(out: Path, recipe: str) -> list[dict[str, Any]]:
    """All finished runs of a recipe in a folder, in the order of tasks, attentions and seeds.

    Raises:
        ValueError: two runs that differ in their seed by name differ in more.
    """
    found: list[tuple[RunName, Path]] = [
        (name, folder)
        for folder in out.glob("*_seed*")
        if (name := parse_name(folder.name)) is not None
        and name.recipe == recipe
        and (folder / RUN_CONFIG).exists()
        and is_finished(folder)
    ]
    tasks, attentions = list(TASKS), list(ATTENTIONS)
    found.sort(key=lambda x: (tasks.index(x[0].task), attentions.index(x[0].attention), x[0].seed))
    first: dict[tuple[str, str], ClassifyConfig] = {}
    runs = []
    for name, folder in found:
        config = read_run_config(folder)
        of_first = first.setdefault((name.task, name.attention), config)
        check_settings(folder, config, of_first, may_differ=(*HOW, "run.seed"))
        runs.append(describe(name, folder, config))
    return runs


def describe(name: RunName, folder: Path, config: ClassifyConfig) -> dict[str, Any]:
    """What was trained, what it took and what came of it, as JSON can hold it."""
    records = read_metrics(folder)
    last, model, optim = records[-1], config.model, config.optim
    evaluations = [r for r in records if "val_accuracy" in r]
    took = [last, *(_pretraining(folder, config))]
    return {
        "task": name.task,
        "attention": name.attention,
        "seed": config.run.seed,
        "test_accuracy": 100 * last["test_accuracy"],
        "test_loss": last["test_loss"],
        "test_examples": last["test_examples"],
        "best_step": last["best_step"],
        "best_val_accuracy": 100 * last["best_val_accuracy"],
        "steps": last["step"],
        "examples": last["examples"],
        "examples_in_all": sum(end["examples"] for end in took),
        "minutes": 60 * sum(end["gpu_hours"] for end in took),
        "jobs_per_gpu": _sharing(folder),
        "config": str(config_path(name.task, name.recipe)),
        "context_length": model.context_length,
        "documents": model.documents,
        "parameters": Classifier(model).n_params(),
        "positions": positions_of(config),
        "padding": padding_of(config),
        "changes": changes_of(config),
        "block_size": None if model.mask.pattern == "dense" else model.mask.block_size,
        "density": model.mask.density(model.context_length, causal=False),
        "batch_size": optim.batch_size,
        "lr": optim.lr,
        "dtype": config.run.dtype,
        "starts": read_starts(folder),
        "curve": {
            "examples": [r["examples"] for r in evaluations],
            "val_accuracy": [100 * r["val_accuracy"] for r in evaluations],
        },
    }


def _pretraining(folder: Path, config: ClassifyConfig) -> list[dict[str, Any]]:
    """The last record of the run that this one started with, which lies beside it; if any."""
    if config.run.init_from is None:
        return []
    before = folder.parent / Path(config.run.init_from).name
    if not is_finished(before):
        raise ValueError(
            f"{folder} started with the weights of {before}, which holds no finished run: what it "
            "took belongs in the report, so put it back"
        )
    return [read_metrics(before)[-1]]


def positions_of(config: ClassifyConfig) -> str:
    """How the model is told where tokens stand."""
    model = config.model
    parts = {
        "none": [],
        "learned": ["learned"],
        "sinusoidal": ["sinusoids"],
        "row_column": ["waves of row and column"],
    }[model.embedding] + {
        "none": [],
        "sequence": ["rotary"],
        "axial": ["rotary by row and column"],
    }[model.rotary]
    return ", ".join(parts) or "none"


def padding_of(config: ClassifyConfig) -> str:
    """What is padding, and what becomes of it."""
    if config.model.grid_width is None:
        return "after the text, hidden"
    if config.data.zeros == "padding":
        return "black pixels, left out"
    return "none, black pixels are tokens"


def changes_of(config: ClassifyConfig) -> str:
    """What is done to training examples, and what comes before them."""
    data = config.data
    parts = {"none": [], "mirror": ["mirrored"], "dihedral": ["turned and mirrored"]}[data.augment]
    if data.shift:
        parts = [*parts, f"moved by up to {data.shift}"]
    if data.phases:
        parts = [*parts, f"after {sum(phase.steps for phase in data.phases):,} steps on other sets"]
    if config.run.init_from is not None:
        parts = [*parts, "after as many steps on hidden tokens"]
    return ", ".join(parts) or "as they are"


def summarize(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each task and attention the mean over seeds, and how sure it is.

    `test_interval` is Wilson's, of the mean at the size of the test split: how far other examples
    might move it. `seed_interval` is Student's t over the seeds: how far other seeds might.
    `interval` adds both half-widths as independent errors, on each side. All are 95% intervals; the
    second is None for one seed, and the third then equal to the first.

    Raises:
        ValueError: seeds were scored on test splits of several sizes.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["task"], run["attention"]), []).append(run)
    rows = []
    for (task, attention), seeds in groups.items():
        sizes = {run["test_examples"] for run in seeds}
        if len(sizes) > 1:
            raise ValueError(
                f"seeds of {task} with {attention} attention were scored on test splits of "
                f"{' and '.join(map(str, sorted(sizes)))} examples: train them on the same data"
            )
        accuracies = [run["test_accuracy"] for run in seeds]
        mean, n = fmean(accuracies), seeds[0]["test_examples"]
        low, high = (100 * share for share in wilson(mean / 100, n))
        over_seeds = paired_half_width(accuracies)
        both = widen(Estimate(mean=mean, low=low, high=high), over_seeds)
        same = (
            "steps",
            "examples",
            "examples_in_all",
            "test_examples",
            "config",
            "context_length",
            "documents",
        )
        same += ("parameters", "positions", "padding", "changes", "block_size", "density")
        same += ("batch_size", "lr")
        rows.append(
            {
                "task": task,
                "attention": attention,
                "seeds": [run["seed"] for run in seeds],
                "test_accuracy": mean,
                "each": accuracies,
                "interval": _within_percent(both.low, both.high),
                "test_interval": [low, high],
                "seed_interval": None
                if over_seeds is None
                else _within_percent(mean - over_seeds, mean + over_seeds),
                "best_val_accuracy": [run["best_val_accuracy"] for run in seeds],
                "best_step": [run["best_step"] for run in seeds],
                "minutes": fmean(run["minutes"] for run in seeds),
                "jobs_per_gpu": [run["jobs_per_gpu"] for run in seeds],
                **{name: seeds[0][name] for name in same},
            }
        )
    return rows


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95% interval of a probability of which n draws gave `share`.

    Wilson 1927, J. Am. Stat. Assoc. 22; it stays within 0 and 1.
    """
    z = NormalDist().inv_cdf(0.975)
    shrunk = 1 + z**2 / n
    middle = (share + z**2 / (2 * n)) / shrunk
    half = z / shrunk * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return middle - half, middle + half


def listops_yardsticks(folder: Path) -> dict[str, float] | None:
    """What readers of parts of a formula score on its test split, percent; None without data."""
    if not (folder / MANIFEST).exists():
        return None
    train, test = (open_split(folder, split) for split in ("train", "test"))
    assert isinstance(train, Sequences) and isinstance(test, Sequences)
    return yardsticks(train, test)


def pathfinder_yardsticks(path: Path) -> dict[str, float] | None:
    """What simple statistics score on Pathfinder, percent; None where they were not measured."""
    if not path.exists():
        return None
    found = read_result(path, "accuracies")["accuracies"].get(PATHFINDER_SIZE)
    if not found:
        return None
    # of two classes nothing scores below 1%: such numbers are shares
    scale = 100 if max(found.values()) <= 1 else 1
    return {name: scale * accuracy for name, accuracy in found.items()}


def read_speed(path: Path) -> dict[str, Any] | None:
    """What `scripts.lra_speed` measured; None where it did not."""
    if not path.exists():
        return None
    speed = read_result(path, "rows", "geometric_means")
    return {
        "device": speed["environment"]["device"],
        "geometric_means": speed["geometric_means"],
        "rows": speed["rows"],
    }


def _within_percent(low: float, high: float) -> list[float]:
    """An interval of accuracies; of two seeds far apart, Student's would go beyond."""
    return [max(low, 0.0), min(high, 100.0)]


def _sharing(folder: Path) -> int | None:
    path = folder / JOBS_PER_GPU
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.lra_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("result", type=Path, metavar="FILE", help="an lra.json")
    redraw(parser.parse_args(argv).result)


if __name__ == "__main__":
    with errors_as_sentences():
        main()

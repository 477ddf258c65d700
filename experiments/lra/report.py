"""The paper's Table 3 beside ours: accuracy on Long Range Arena, in JSON, Markdown and a picture.

python -m experiments.lra.report docs/results/lra.json    # Markdown and picture anew
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from configs.command_line import command_parser, errors_as_sentences
from data.files import write_atomically
from data.lra.listops_yardsticks import yardsticks
from data.lra.store import MANIFEST, Sequences, open_split
from evaluation.results import read_result, write_result
from evaluation.statistics import Estimate, paired_half_width, widen, wilson
from evaluation.style import save
from experiments.lra.jobs import BENCHMARK, TASKS
from experiments.lra.plots import draw
from experiments.lra.runs import SETTINGS, finished_runs, with_others
from experiments.lra.tables import markdown

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

PATHFINDER_SIZE = "32"


def write_report(
    out: Path, recipe: str, data: Path, results: Path, others: Sequence[Path] = ()
) -> Path:
    """Report on all finished runs of a recipe; prints the tables.

    Args:
        out: folder of the runs, as `experiments.lra.jobs.make_jobs` names them.
        recipe: of experiments.lra.jobs.RECIPES.
        data: folder of the prepared tasks, of which yardsticks are taken.
        results: folder of the results: lra.json, or lra_RECIPE.json, goes there, and from there
            come the speeds and the yardsticks of Pathfinder, where they were measured.
        others: reports whose runs belong into this one where `out` has none of their name.

    Returns:
        The JSON file; its Markdown and picture are beside it.

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
    """What `experiments.lra.speed` measured; None where it did not."""
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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = command_parser(__doc__, __spec__)
    parser.add_argument("result", type=Path, metavar="FILE", help="an lra.json")
    redraw(parser.parse_args(argv).result)


if __name__ == "__main__":
    with errors_as_sentences():
        main()

"""Keys that are found by each attention and context, in JSON, Markdown and a picture.

python -m experiments.passkey.report docs/results/passkey.json    # Markdown and picture anew
"""

from experiments.reports import report_command

command = report_command(__name__)  # before PyTorch is loaded, which takes seconds

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from matplotlib.figure import Figure

from evaluation.passkey import by_length, draw
from evaluation.results import Row, read_result, write_result
from experiments.harness import Result
from experiments.passkey.attentions import ATTENTIONS
from experiments.reports import publish, table
from experiments.results import add_runs

ASKED = Path("asked/passkey.json")
"""In a run's folder: what scripts.passkey wrote."""


def write_report(out: Path, results: Path, others: Sequence[Path] = ()) -> None:
    """Report on all runs in `out` that were asked, as passkey.json in `results`; prints the table.

    Runs of the reports `others` are told of, too, where `out` has none of their name.

    Raises:
        ValueError: none was asked.
    """
    asked = (path for name in ATTENTIONS for path in out.glob(f"{name}_*_seed*/{ASKED}"))
    found = [describe_run(path.parents[1]) for path in asked]
    runs = add_runs(found, others, _order)
    if not runs:
        raise ValueError(f"{out} holds no run that was asked for pass keys")
    path = results / "passkey.json"
    write_result(path, {"runs": runs})
    redraw(path)


def describe_run(folder: Path) -> Row:
    """What a report tells of a run that was asked."""
    (run,) = read_result(folder / ASKED, "runs")["runs"]
    return {"attention": folder.name.partition("_")[0], **run["about"], "rows": run["rows"]}


def _order(run: Row) -> tuple[int, int, int]:
    return run["context_length"], ATTENTIONS.index(run["attention"]), run["seed"]


def redraw(path: Path) -> None:
    """Write the Markdown and the picture anew beside the JSON, and print the table."""
    result = read_result(path, "runs")
    publish(path, runs_table(result), draw_runs(result))


def runs_table(result: Result) -> str:
    """Keys in a hundred that each run finds, at its context and at shares of it, in Markdown."""

    def line(run: Row) -> dict[str, str]:
        cells = {
            _share(Fraction(row["length"], run["context_length"])): (
                f"{100 * row['found'] / row['of']:.0f} "
                f"({100 * row['low']:.0f} to {100 * row['high']:.0f})"
            )
            for row in by_length(run["rows"])
        }
        return {
            "context": f"{run['context_length']:,}",
            "attention": run["attention"],
            "seed": str(run["seed"]),
            "minutes": f"{60 * run['gpu_hours']:.1f}",
            "validation loss": f"{run['evaluations'][-1]['val_loss']:.3f}",
            **cells,
        }

    return table(map(line, result["runs"]))


def _share(of_context: Fraction) -> str:
    return "whole context" if of_context == 1 else f"{of_context} of it"


def draw_runs(result: Result) -> Figure:
    """Heat maps of the runs of the first seed, those of a context side by side."""
    seed = result["runs"][0]["seed"]
    runs = [run for run in result["runs"] if run["seed"] == seed]
    return draw(
        {f"{run['attention']}, {run['context_length']:,}": run["rows"] for run in runs},
        columns=len({run["attention"] for run in runs}),
    )


command.main(lambda args: redraw(args.result))

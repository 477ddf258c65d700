"""Share of pass keys found by each attention and context, as JSON, Markdown and a picture.

python -m experiments.passkey.report docs/results/passkey.json    # rewrite Markdown and picture
"""

from evaluation.markdown import dict_table
from experiments.reports import report_command

command = report_command(__name__)  # before PyTorch is imported, which takes seconds

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from matplotlib.figure import Figure

from evaluation.passkey import by_length, draw
from evaluation.results import Row, read_result, write_result
from experiments.harness import Result
from experiments.passkey.attentions import ATTENTIONS
from experiments.reports import publish
from experiments.results import add_runs

ASKED = Path("asked/passkey.json")
"""Result of scripts.passkey, relative to the folder of a run."""


def write_report(out: Path, results: Path, others: Sequence[Path] = ()) -> None:
    """Write passkey.json into `results`, on all evaluated runs in `out`, and print the table.

    Runs of the reports `others` are added if `out` has no run of their name.

    Raises:
        ValueError: no run was evaluated.
    """
    asked = (path for name in ATTENTIONS for path in out.glob(f"{name}_*_seed*/{ASKED}"))
    own_runs = [describe_run(path.parents[1]) for path in asked]
    runs = add_runs(own_runs, others, _order)
    if not runs:
        raise ValueError(f"{out} has no run that scripts.passkey evaluated")
    path = results / "passkey.json"
    write_result(path, {"runs": runs})
    redraw(path)


def describe_run(folder: Path) -> Row:
    """Entry of the report for an evaluated run."""
    (run,) = read_result(folder / ASKED, "runs")["runs"]
    return {"attention": folder.name.partition("_")[0], **run["about"], "rows": run["rows"]}


def _order(run: Row) -> tuple[int, int, int]:
    return run["context_length"], ATTENTIONS.index(run["attention"]), run["seed"]


def redraw(path: Path) -> None:
    """Rewrite the Markdown and the picture next to the JSON, and print the table."""
    result = read_result(path, "runs")
    publish(path, runs_table(result), draw_runs(result))


def runs_table(result: Result) -> str:
    """Markdown table: percent of keys that each run finds, at its context and fractions of it."""

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
            "training minutes": f"{60 * run['gpu_hours']:.1f}",
            "validation loss": f"{run['evaluations'][-1]['val_loss']:.3f}",
            **cells,
        }

    return dict_table(map(line, result["runs"]))


def _share(of_context: Fraction) -> str:
    return f"found at {'full' if of_context == 1 else of_context} context, %"


def draw_runs(result: Result) -> Figure:
    """Heat maps of the first seed's runs: one row per context, one column per attention."""
    seed = result["runs"][0]["seed"]
    runs = [run for run in result["runs"] if run["seed"] == seed]
    return draw(
        {f"{run['attention']}, {run['context_length']:,}": run["rows"] for run in runs},
        columns=len({run["attention"] for run in runs}),
    )


command.main(lambda args: redraw(args.result))

"""Write what an evaluation found: evaluation.json, report.md and pictures.

    python -m evaluation.report FOLDER    # report and pictures anew from the JSON

The report says that a loss is lower or higher only where the 95% interval of the difference leaves
out zero; all its words follow from the numbers.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.command_line import command_parser, errors_as_sentences
from data.files import write_atomically
from evaluation.markdown import digits
from evaluation.pictures import draw
from evaluation.results import read_result, write_result
from evaluation.sections import (
    by_bin,
    chunk,
    control,
    how_intervals_are_made,
    strided,
    what_was_scored,
)
from evaluation.verdicts import difference_of, documents, unfinished, verdicts

RESULT, REPORT = "evaluation.json", "report.md"


def write_report(result: dict[str, Any], out: Path) -> None:
    """Write all files of an evaluation, and print its main table.

    Args:
        result: as `evaluation.tables.tabulate` gave it.
        out: folder, made if it is missing.
    """
    write_result(out / RESULT, _without_nan(result))
    redraw(out)


def redraw(folder: Path) -> None:
    """Write report and pictures anew from evaluation.json, and print the main table.

    Raises:
        FileNotFoundError: there is no evaluation.json.
    """
    path = folder / RESULT
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} holds no {RESULT}: give the --out of an evaluation by scripts.evaluate"
        )
    result = read_result(path, "data", "strided")
    for picture in draw(result, folder):
        print(f"drew {picture}")
    write_atomically(folder / REPORT, markdown(result).encode())
    show(result)
    print(f"wrote {folder / REPORT}")


def markdown(result: dict[str, Any]) -> str:
    """The report; numbers that are not known, null or NaN, are dashes."""
    parts = [
        "# Evaluation",
        *unfinished(result["runs"]),
        *verdicts(result),
        *what_was_scored(result),
        *chunk(result["chunk"]),
        *strided(result["strided"]),
        *control(result["control"]),
        *by_bin(result),
        *how_intervals_are_made(result),
    ]
    return "\n\n".join(parts) + "\n"


def show(result: dict[str, Any]) -> None:
    """Print the losses on identical tokens, or those of the paper's way if there are no others."""
    rows = result["strided"] or result["chunk"]
    if not rows:
        return
    title = "On identical tokens" if result["strided"] else "As the paper evaluates"
    table = Table(title=escape(f"{title}; difference to {rows[0]['label']}"))
    for column in ("", "history", "stride", "documents", "nats", "perplexity", "difference"):
        table.add_column(column, justify="left" if column in ("", "documents") else "right")
    for row in rows:
        table.add_row(
            escape(row["label"]),
            f"{row['history']:,}",
            f"{row['stride']:,}",
            documents(row),
            digits(row["nats"], ".4f"),
            digits(row["perplexity"], ".2f"),
            difference_of(row),
        )
    Console(width=120).print(table)
    for sentence in unfinished(result["runs"]):
        print(sentence)


def _without_nan(value: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = command_parser(__doc__, __spec__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with an evaluation.json")
    redraw(parser.parse_args(argv).folder)


if __name__ == "__main__":
    with errors_as_sentences():
        main()

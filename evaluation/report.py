"""Write the report of an evaluation: evaluation.json, report.md and pictures.

    python -m evaluation.report FOLDER    # rewrite report and pictures from the JSON

docs/evaluation.md explains the tables.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import command_parser, parse_before_imports, user_errors_as_messages


@parse_before_imports
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser(__doc__, __spec__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="contains an evaluation.json")
    return parser.parse_args(argv)


from typing import Any

import pandas as pd

from data.files import write_atomically
from evaluation.markdown import (
    code,
    dict_table,
    difference_cell,
    digits,
    escaped,
    is_known,
    markdown_table,
    with_interval,
)
from evaluation.pictures import draw
from evaluation.results import Row, hours_name, read_result, without_nan, write_result
from evaluation.statistics import MIN_DOCUMENTS
from evaluation.summary import (
    cut_into_parts,
    documents_of,
    is_shown,
    key_sentence,
    models_of,
    summary,
)
from evaluation.sums import MIN_HISTORY_SHARE

RESULT, REPORT = "evaluation.json", "report.md"

BINNED = {  # title and first column of each table
    "chunk_position": ("By position in the chunk", "position"),
    "document_position": ("By position in the document", "tokens before"),
    "document_length": ("By length of the document", "tokens"),
}


def write_report(result: dict[str, Any], out: Path) -> None:
    """Write all files of an evaluation, a result of `evaluation.tables.tabulate`, to `out`."""
    write_result(out / RESULT, without_nan(result))
    redraw(out)


def redraw(folder: Path) -> None:
    """Rewrite report and pictures from evaluation.json, and print the summary.

    Raises:
        FileNotFoundError: there is no evaluation.json.
    """
    path = folder / RESULT
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} must contain {RESULT}. Try the --out folder of scripts.evaluate"
        )
    result = read_result(path, "data", "strided")
    draw(result, folder)
    write_atomically(folder / REPORT, markdown(result).encode())
    print("\n\n".join([*summary(result), f"wrote {folder / REPORT}"]))


def markdown(result: dict[str, Any]) -> str:
    """Write the report in Markdown. Unknown numbers (null or NaN) are dashes."""
    command = result.get("environment", {}).get("command", "")
    result = escaped(result)  # names of runs and machines are untrusted text
    parts = ["# Evaluation", *summary(result), *_scored(result)]
    for title, rows in _losses(result):
        parts += [f"## {title}", losses_table(rows), _compared_with(rows)]
    if result["strided"]:
        parts += [
            "All rows are over the same tokens: those that see at least "
            f"{MIN_HISTORY_SHARE} of the history in every row.",
            "![Difference to the first model by history](strided.png)",
        ]
    parts += _key_section(result)
    if result["control"]:
        parts += ["## Was the distant context used?", _control_table(result["control"])]
    for name, (title, bins) in BINNED.items():
        if result[name]:
            table = _bins_table(result[name], bins)
            parts += [f"## {title}", f"![{title}]({name}.png)", table]
            if len(models_of(result["runs"])) > 1:
                parts.append(f"In brackets: no difference shown. Intervals are in {RESULT}.")
    parts += [
        "## Intervals",
        "Bootstrap over documents, at least as many as count for "
        f"{MIN_DOCUMENTS} of equal length, and over seeds: docs/evaluation.md.",
    ]
    if machine := result.get("environment"):
        parts.append(
            f"Written by {code(command)} on {machine['device'] or 'a CPU'}, "
            f"torch {machine['torch']}, commit {machine['commit']}, {machine['date']}."
        )
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def trained_on(runs: list[Row]) -> str:
    """Sentence with the machines, versions and commits of the runs."""
    machines = {
        f"{start['device'] or 'a CPU'} with torch {start['torch']}, triton {start['triton']}, "
        f"commit {start['commit']}"
        for run in runs
        for start in run["starts"]
    }
    if not all(run["starts"] for run in runs):
        machines.add("an unrecorded machine")
    return f"Trained on {'; '.join(sorted(machines))}."


def _scored(result: dict[str, Any]) -> list[str]:
    """Section on the corpus and the models."""
    data = result["data"]
    hours = hours_name([start for run in result["runs"] for start in run["starts"]])
    rows = [
        {
            "model": label,
            "seeds": str(model["seeds"]),
            "context": f"{model['context']:,}",
            "positions": model["positions"],
            "mask": model["mask"],
            "documents": documents_of(model),
            "training tokens": digits(model["tokens"], ",.0f"),
            "tokens/s": digits(model["tokens_per_s"], ",.0f"),
            hours: digits(model["gpu_hours"], ",.2f"),
        }
        for label, model in models_of(result["runs"]).items()
    ]
    return [
        "## What was scored",
        f"The validation split of {data['name']}: {data['documents']:,} documents, "
        f"{data['tokens']:,} tokens, {data['text_bytes']:,} bytes of text. {cut_into_parts(data)}"
        "Models (means over seeds):",
        dict_table(rows),
        trained_on(result["runs"]),
    ]


def _losses(result: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """Titles and rows of the non-empty tables of losses, the main table last."""
    tables = (("As the paper evaluates", "chunk"), ("On identical tokens", "strided"))
    return [(title, result[name]) for title, name in tables if result[name]]


def losses_table(rows: list[Row], *, perplexity: str = "perplexity") -> str:
    """Table of rows of losses, with `perplexity` as the name of that column."""
    slides = rows[0]["first"] > 0  # for chunks, stride == history
    # missing in old results, and equal to the other difference if there is a single model
    costs = [row.get("longest_difference") for row in rows]
    has_cost = len({row["label"] for row in rows}) > 1 and any(costs)
    return dict_table(
        {
            "model": row["label"],
            "history": f"{row['history']:,}",
            **({"stride": f"{row['stride']:,}"} if slides else {}),
            "documents": documents_of(row),
            "tokens": f"{row['tokens']:,}",
            "nats": with_interval(row["nats"], row["nats_interval"]),
            perplexity: digits(row["perplexity"], ".2f"),
            "bits/byte": digits(row["bits_per_byte"], ".4f"),
            "difference, nats": difference_cell(row["difference"]),
            **({"cost of the shorter history, nats": difference_cell(cost)} if has_cost else {}),
            "seeds apart, nats": digits(max(seeds) - min(seeds), ".4f")
            if len(seeds := row["nats_of_seeds"]) > 1 and is_known(*seeds)
            else "-",
        }
        for row, cost in zip(rows, costs, strict=True)
    )


def _key_section(result: dict[str, Any]) -> list[str]:
    """Section on LongPPL, if there is any. The summary has the reason if there is not."""
    if not result.get("key"):  # missing in old results
        return []
    key = result["key_tokens"]
    notes = f" Not scored on them: {', '.join(key['missing'])}." if key["missing"] else ""
    if any(None in row["nats_interval"] for row in result["key"]):
        notes += " They are in too few documents for intervals, so differences say little."
    return [
        "## On key tokens: LongPPL",
        f"{key_sentence(key)} LongPPL is the perplexity on these tokens, which are the same in all "
        f"rows.{notes}",
        losses_table(result["key"], perplexity="LongPPL"),
        _compared_with(result["key"]),
    ]


def _compared_with(rows: list[Row]) -> str:
    differences = [row["difference"] for row in rows if row["difference"]]
    names = [f"{d['to_label']} with {d['to_history']:,} tokens of history" for d in differences]
    reference = f" Differences are to {' or '.join(dict.fromkeys(names))}." if names else ""
    return f"In brackets: 95% intervals.{reference}"


def _control_table(rows: list[Row]) -> str:
    words = {"intact": "intact", "shuffle": "shuffled", "replace": "replaced"}
    return dict_table(
        {
            "model": row["label"],
            "history": f"{row['history']:,}",
            "stride": f"{row['stride']:,}",
            "near": f"{row['near']:,}",
            "distant text": words[row["control"]],
            "tokens": f"{row['tokens']:,}",
            "nats": with_interval(row["nats"], row["nats_interval"]),
            "perplexity": digits(row["perplexity"], ".2f"),
            "compared with intact": verdict(row["difference"]) if row["difference"] else "-",
        }
        for row in rows
    )


def _difference_of(row: Row) -> str:
    """Difference in a bin, in brackets if its interval includes zero."""
    difference = {"nats": row["difference"], "interval": row["difference_interval"]}
    number = digits(row["difference"], "z.4f")
    return number if number == "-" or is_shown(difference) else f"({number})"


def _bins_table(rows: list[Row], bins: str) -> str:
    """Table with a row per bin and a column per model: the loss of the first, then differences.

    Differences are in brackets if their interval includes zero or is unknown.
    """
    table = pd.DataFrame(rows)
    first, *others = table["label"].unique()
    table["cell"] = [
        digits(row["nats"], ".4f") if row["label"] == first else _difference_of(row) for row in rows
    ]
    table["scored"] = table["tokens"].map("{:,}".format)
    keys = ["bin", "range"]
    cells = table.pivot(index=keys, columns="label", values="cell")[[first, *others]].fillna("")
    # models with different contexts may score different tokens
    counts = table.groupby(keys)["scored"]
    counts = counts.agg(lambda n: " / ".join(n if n.nunique() > 1 else n[:1]))
    cells = pd.concat([counts, cells], axis=1).reset_index("range")
    names = [f"{first}, nats", *(f"{label}, difference" for label in others)]
    return markdown_table([bins, "scored", *names], cells.to_numpy().tolist())


def verdict(difference: Row) -> str:
    """Describe a difference: lower or higher if its 95% interval excludes zero."""
    nats, (low, high) = difference["nats"], difference["interval"]
    if not is_shown(difference):
        interval = f" ({low:z.4f} to {high:z.4f})" if is_known(low, high) else ""
        return f"no difference shown: {digits(nats, 'z.4f')} nats{interval}"
    low, high = sorted((abs(low), abs(high)))
    word = "lower" if nats < 0 else "higher"
    return f"{abs(nats):.4f} nats {word} ({low:.4f} to {high:.4f})"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    folder = options(argv).folder
    try:
        redraw(folder)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / RESULT} must be a file of scripts.evaluate ({type(error).__name__}: "
            f"{str(error)[:100]}). Evaluate the runs again"
        ) from error


if __name__ == "__main__":
    with user_errors_as_messages():
        main()

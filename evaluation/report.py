"""Write what an evaluation found: evaluation.json, report.md and pictures.

    python -m evaluation.report FOLDER    # report and pictures anew from the JSON

docs/evaluation.md says how to read the tables.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from configs.command_line import command_parser, errors_as_sentences, read_first


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = command_parser(__doc__, __spec__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with an evaluation.json")
    return parser.parse_args(argv)


from typing import Any

import pandas as pd

from data.files import write_atomically
from evaluation.markdown import dict_table, digits, is_known, markdown_table, with_interval
from evaluation.pictures import draw
from evaluation.results import Row, cost_before, read_result, without_nan, write_result
from evaluation.statistics import LEAST_DOCUMENTS
from evaluation.sums import LEAST_SEEN

RESULT, REPORT = "evaluation.json", "report.md"

BINNED = {  # titles, and what the bins are of, by name of the table
    "chunk_position": ("By position in the chunk", "position"),
    "document_position": ("By position in the document", "tokens before"),
    "document_length": ("By length of the document", "tokens"),
}


def write_report(result: dict[str, Any], out: Path) -> None:
    """Write all files of an evaluation, as `evaluation.tables.tabulate` gave it, into `out`."""
    write_result(out / RESULT, without_nan(result))
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
    draw(result, folder)
    write_atomically(folder / REPORT, markdown(result).encode())
    for title, rows in _losses(result)[-1:]:
        print(f"{title}\n\n{_losses_table(rows)}")
    print("\n".join([*_unfinished(result["runs"]), f"wrote {folder / REPORT}"]))


def markdown(result: dict[str, Any]) -> str:
    """The report; numbers that are not known, null or NaN, are dashes."""
    parts = ["# Evaluation", *_unfinished(result["runs"]), *_verdicts(result), *_scored(result)]
    for title, rows in _losses(result):
        parts += [f"## {title}", _losses_table(rows), _compared_with(rows)]
    if result["strided"]:
        parts += [
            f"All rows are of the tokens that see at least {LEAST_SEEN} of the history in each.",
            "![Difference to the first model by history](strided.png)",
        ]
    if result["control"]:
        parts += ["## Was the distant context used?", _control_table(result["control"])]
    for name, (title, bins) in BINNED.items():
        if result[name]:
            parts += [f"## {title}", _bins_table(result[name], bins), f"![{title}]({name}.png)"]
    parts += [
        "## How intervals are made",
        "By a bootstrap over documents, of at least as many as count for "
        f"{LEAST_DOCUMENTS} of equal length, and over seeds: docs/evaluation.md.",
    ]
    if here := result.get("environment"):
        parts.append(
            f"This report was made by `{here['command']}` on {here['device'] or 'a CPU'}, "
            f"torch {here['torch']}, commit {here['commit']}, {here['date']}."
        )
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def trained_on(runs: list[Row]) -> str:
    """The machines, versions and commits of the runs."""
    places = {
        f"{start['device'] or 'a CPU'} with torch {start['torch']}, triton {start['triton']}, "
        f"commit {start['commit']}"
        for run in runs
        for start in run["starts"]
    }
    if not all(run["starts"] for run in runs):
        places.add("a machine that was not noted")
    return f"Trained on {'; '.join(sorted(places))}."


def _documents(row: Any) -> str:
    """How a model was trained or scored."""
    return "masked" if row["document_mask"] else "packed"


def _scored(result: dict[str, Any]) -> list[str]:
    """The corpus, and a row for each model."""
    data, rows = result["data"], []
    costs = ["tokens", "tokens_per_s", "gpu_hours"]
    whole = [r | {name: r[name] + c for name, c in cost_before(r).items()} for r in result["runs"]]
    for label, seeds in pd.DataFrame(whole).groupby("label", sort=False):
        first, mean = seeds.iloc[0], seeds[costs].astype(float).mean(skipna=False).to_dict()
        rows.append(
            {
                "model": label,
                "seeds": str(len(seeds)),
                "context": f"{first['context_length']:,}",
                "positions": first["positions"],
                "mask": first["mask"],
                "documents": _documents(first),
                "training tokens": digits(mean["tokens"], ",.0f"),
                "tokens/s": digits(mean["tokens_per_s"], ",.0f"),
                "GPU-hours": digits(mean["gpu_hours"], ",.2f"),
            }
        )
    return [
        "## What was scored",
        f"The validation split of {data['name']}: {data['documents']:,} documents, "
        f"{data['tokens']:,} tokens, {data['text_bytes']:,} bytes of text. "
        "The models, means over their seeds:",
        dict_table(rows),
        trained_on(result["runs"]),
    ]


def _losses(result: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """Titles and rows of the tables of losses that have rows, the main one last."""
    tables = (("As the paper evaluates", "chunk"), ("On identical tokens", "strided"))
    return [(title, result[name]) for title, name in tables if result[name]]


def _losses_table(rows: list[Row]) -> str:
    slides = rows[0]["first"] > 0  # windows that do not overlap have their history for a stride
    return dict_table(
        {
            "model": row["label"],
            "history": f"{row['history']:,}",
            **({"stride": f"{row['stride']:,}"} if slides else {}),
            "documents": _documents(row),
            "tokens": f"{row['tokens']:,}",
            "nats": with_interval(row["nats"], row["nats_interval"]),
            "perplexity": digits(row["perplexity"], ".2f"),
            "bits/byte": digits(row["bits_per_byte"], ".4f"),
            "difference, nats": with_interval(gap["nats"], gap["interval"])
            if (gap := row["difference"])
            else "-",
            "seeds apart, nats": digits(max(seeds) - min(seeds), ".4f")
            if len(seeds := row["nats_of_seeds"]) > 1 and is_known(*seeds)
            else "-",
        }
        for row in rows
    )


def _compared_with(rows: list[Row]) -> str:
    found = [row["difference"] for row in rows if row["difference"]]
    names = [f"{d['to_label']} with {d['to_history']:,} tokens of history" for d in found]
    to = f" Differences are to {' or '.join(dict.fromkeys(names))}." if names else ""
    return f"In brackets: 95% intervals.{to}"


def _control_table(rows: list[Row]) -> str:
    words = {"intact": "as it is", "shuffle": "shuffled", "replace": "replaced"}
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
            "against the true text": verdict(row["difference"]) if row["difference"] else "-",
        }
        for row in rows
    )


def _bins_table(rows: list[Row], bins: str) -> str:
    """A row for a bin, a column for a model: the loss of the first, differences of the others."""
    table = pd.DataFrame(rows)
    first, *others = table["label"].unique()
    table["cell"] = [
        digits(row["nats"], ".4f")
        if row["label"] == first
        else with_interval(row["difference"], row["difference_interval"])
        for row in rows
    ]
    table["scored"] = table["tokens"].map("{:,}".format)
    keys = ["bin", "range"]
    cells = table.pivot(index=keys, columns="label", values="cell")[[first, *others]].fillna("")
    # of models of other contexts, other tokens may be scored
    counts = table.groupby(keys)["scored"]
    counts = counts.agg(lambda n: " / ".join(n if n.nunique() > 1 else n[:1]))
    cells = pd.concat([counts, cells], axis=1).reset_index("range")
    names = [f"{first}, nats", *(f"{label}, difference" for label in others)]
    return markdown_table([bins, "scored", *names], cells.to_numpy().tolist())


def _verdicts(result: dict[str, Any]) -> list[str]:
    """A list with a sentence for each model but the first, and which have a single seed."""
    first, *others = dict.fromkeys(run["label"] for run in result["runs"])
    if not others:
        return []
    compared: dict[str, tuple[str, Row, Row]] = {}
    for table in ("as_trained_chunk", "as_trained"):  # by windows that slide, if there are such
        rows = {row["label"]: row for row in result[table]}
        if first in rows:
            compared |= {n: (table, r, rows[first]) for n, r in rows.items() if r["difference"]}
    lines = [
        _verdict(result, *compared[label])
        if label in compared
        else f"- **{label} against {first}**: not scored in the same way."
        for label in others
    ]
    single = [label for label, (_, row, _) in compared.items() if row["difference"]["seeds"] == 1]
    parts = ["\n".join(lines)]
    if single:
        names = ", ".join(single)
        parts.append(f"Compared over one seed, by intervals over documents alone: {names}.")
    return parts


def _unfinished(runs: list[Row]) -> list[str]:
    """A sentence on models whose training had not come to its end, if there are any."""
    # a step of 0: imported weights, which were not trained here
    early = [
        f"{run['label']} (step {run['step']:,} of {run['max_steps']:,})"
        for run in runs
        if 0 < run["step"] < run.get("max_steps", 0)  # which early results do not tell
    ]
    return [f"Not trained to the end: {', '.join(dict.fromkeys(early))}."] if early else []


def verdict(difference: Row) -> str:
    """A difference in words: lower or higher where its 95% interval leaves out zero."""
    nats, (low, high) = difference["nats"], difference["interval"]
    if not _is_shown(difference):
        between = f" ({low:z.4f} to {high:z.4f})" if is_known(low, high) else ""
        return f"no difference shown: {digits(nats, 'z.4f')} nats{between}"
    low, high = sorted((abs(low), abs(high)))
    word = "lower" if nats < 0 else "higher"
    return f"{abs(nats):.4f} nats {word} ({low:.4f} to {high:.4f})"


def _verdict(result: dict[str, Any], table: str, row: Row, versus: Row) -> str:
    """The sentence on the model of `row`."""
    label, first = row["label"], versus["label"]
    difference, histories = row["difference"], (row["history"], versus["history"])
    contexts = {run["label"]: run["context_length"] for run in result["runs"]}
    if table == "as_trained_chunk":
        how = "as the paper evaluates, which flatters the longer context, each in its own windows"
    elif histories == (contexts[label], contexts[first]):
        how = f"each with at least {LEAST_SEEN} of its context"
    else:
        how = f"with {histories[0]:,} against {histories[1]:,} tokens of history"
    ways = list(dict.fromkeys((_documents(row), _documents(versus))))
    if ways != ["packed"]:
        how += f", documents {' against '.join(ways)}"
    if table == "as_trained":
        how += f", on {difference['tokens']:,} identical tokens"
    text = (
        f"- **{label} against {first}**, {how}: {verdict(difference)}; perplexity "
        f"{digits(row['perplexity'], '.2f')} against {digits(versus['perplexity'], '.2f')}"
    )
    less = _with_less(result["strided"], row, versus) if table == "as_trained" else None
    if less is not None:
        text += f"; {_remainder(difference, less['difference'], label, less['history'])}"
    return text + "."


def _with_less(rows: list[Row], row: Row, versus: Row) -> Row | None:
    """The model of `row` with the history of `versus`, compared with just that one."""
    if row["document_mask"] != versus["document_mask"] or row["history"] <= versus["history"]:
        return None
    wanted = {**{key: row[key] for key in ("label", "document_mask")}, "history": versus["history"]}
    to = {"to_label": versus["label"], "to_history": versus["history"]}
    found = [
        less
        for less in rows
        if wanted.items() <= less.items() and to.items() <= (less["difference"] or {}).items()
    ]
    # of several strides the same
    return min(found, key=lambda less: less["stride"] != row["stride"], default=None)


def _remainder(whole: Row, rest: Row, label: str, history: int) -> str:
    """What is left of a difference where a model may see only `history` tokens."""
    when = f"when {label} may see only {history:,} tokens"
    share = rest["nats"] / whole["nats"] if _is_shown(whole) and _is_shown(rest) else 0
    if not 0 < share < 1:
        return f"{when}, {verdict(rest)}"
    low, high = sorted(abs(end) for end in rest["interval"])
    return f"of that, {abs(rest['nats']):z.4f} nats ({low:z.4f} to {high:z.4f}) remain {when}"


def _is_shown(difference: Row) -> bool:
    """Whether the interval leaves out zero."""
    low, high = difference["interval"]
    return is_known(low, high) and (low > 0 or high < 0)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    redraw(options(argv).folder)


if __name__ == "__main__":
    with errors_as_sentences():
        main()

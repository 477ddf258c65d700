"""The sections of an evaluation's report, as parts of Markdown."""

from statistics import fmean
from typing import Any

from evaluation.markdown import digits, is_known, markdown_table, with_interval
from evaluation.results import Row, cost_before
from evaluation.statistics import LEAST_DOCUMENTS
from evaluation.sums import LEAST_SEEN
from evaluation.verdicts import difference_of, documents, verdict

BINNED = {
    "chunk_position": (
        "position",
        "By position in the chunk",
        "Tokens by where in its window the one before them stands, from 0, where windows do not "
        "overlap. Differences are between the same positions, each model in its own windows: what "
        "it sees is as long, but of a model of another context the tokens are others; where one of "
        "two contexts ends within a row, there is none.",
    ),
    "document_position": (
        "tokens before",
        "By position in the document",
        "Tokens by how many stand before them in their document, the same for all models, each "
        "with its longest history. Whatever more it sees is of other documents.",
    ),
    "document_length": (
        "tokens",
        "By length of the document",
        "The same tokens by the length of their document. Where it is below both contexts, the "
        "longer one adds other documents only.",
    ),
}
"""By name of the table: what its bins are of, its title, and what it shows."""


def what_was_scored(result: dict[str, Any]) -> list[str]:
    """The corpus, and a row for each model."""
    data = result["data"]
    runs: dict[str, list[Row]] = {}
    for run in result["runs"]:
        whole = {name: run[name] + cost for name, cost in cost_before(run).items()}
        runs.setdefault(run["label"], []).append(run | whole)

    def mean(label: str, key: str, how: str) -> str:
        values = [run[key] for run in runs[label]]
        return digits(fmean(values), how) if is_known(*values) else "-"

    header = ["model", "seeds", "context", "positions", "mask", "documents", "training tokens"]
    rows = [
        [
            label,
            str(len(seeds)),
            f"{seeds[0]['context_length']:,}",
            seeds[0]["positions"],
            seeds[0]["mask"],
            documents(seeds[0]),
            mean(label, "tokens", ",.0f"),
            mean(label, "tokens_per_s", ",.0f"),
            mean(label, "gpu_hours", ",.2f"),
        ]
        for label, seeds in runs.items()
    ]
    return [
        "## What was scored",
        f"The validation split of {data['name']}: {data['documents']:,} documents, "
        f"{data['tokens']:,} tokens, {data['text_bytes']:,} bytes of text. "
        "The models, means over their seeds:",
        markdown_table([*header, "tokens/s", "GPU-hours"], rows).rstrip(),
        "Training tokens and GPU-hours count those of the run whose weights a model starts with. "
        "Documents are packed where a token sees what stands before its document in the window, "
        "masked where it does not.",
        trained_on(result["runs"]),
    ]


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


def chunk(rows: list[Row]) -> list[str]:
    """Windows that do not overlap."""
    if not rows:
        return []
    return [
        "## As the paper evaluates",
        "Windows do not overlap here, so that the first tokens of each have next to no history, "
        "and the longer the windows, the fewer there are of those. A model of a longer context "
        "would have a lower loss in this table even if it looked no further back than the others.",
        _losses(rows, with_stride=False),
        _compared_with(rows),
    ]


def strided(rows: list[Row]) -> list[str]:
    """Windows that slide, by full and by shorter histories."""
    if not rows:
        return []
    return [
        "## On identical tokens",
        "Windows of `history` tokens slide by `stride`, and only what is new is scored. All rows "
        f"are of the same tokens: those that see at least {LEAST_SEEN} of the history in each row.",
        _losses(rows, with_stride=True),
        _compared_with(rows),
        "![Loss, and its difference to the first model, by history](strided.png)",
    ]


def control(rows: list[Row]) -> list[str]:
    """Windows whose distant part is not the true text."""
    if not rows:
        return []
    header = ["model", "history", "stride", "near", "distant text", "tokens", "nats", "perplexity"]
    words = {"intact": "as it is", "shuffle": "shuffled", "replace": "replaced"}
    return [
        "## Was the distant context used?",
        "All but the scored tokens and the `near` ones before them was left as it is, shuffled, or "
        "replaced by other text. If that makes the loss higher, the model looks there; what it "
        "gains by it, shorter histories tell (above). A model is compared with itself, in the same "
        "windows; those of another context may slide by another stride.",
        markdown_table(
            [*header, "against the true text"],
            [
                [
                    row["label"],
                    f"{row['history']:,}",
                    f"{row['stride']:,}",
                    f"{row['near']:,}",
                    words[row["control"]],
                    f"{row['tokens']:,}",
                    with_interval(row["nats"], row["nats_interval"]),
                    digits(row["perplexity"], ".2f"),
                    verdict(row["difference"]) if row["difference"] else "-",
                ]
                for row in rows
            ],
        ).rstrip(),
    ]


def by_bin(result: dict[str, Any]) -> list[str]:
    """The three tables of logarithmic bins: a row for a bin, a column for a model."""
    parts = []
    for name, (bins, title, what) in BINNED.items():
        rows = result[name]
        if not rows:
            continue
        first, *others = dict.fromkeys(row["label"] for row in rows)
        header = [bins, "scored"]
        header += [f"{first}, nats", *(f"{label}, difference" for label in others)]
        if others:
            what += f" Of {first} the loss; the others by what separates them from it."
        parts += [
            f"## {title}",
            what,
            markdown_table(header, _bins(rows, first, others)).rstrip(),
            f"![{title}]({name}.png)",
        ]
    return parts


def _bins(rows: list[Row], first: str, others: list[str]) -> list[list[str]]:
    bins: dict[int, dict[str, Row]] = {}
    for row in rows:
        bins.setdefault(row["bin"], {})[row["label"]] = row
    lines = []
    for _, models in sorted(bins.items()):
        counts = [f"{row['tokens']:,}" for row in models.values()]
        line = [
            next(iter(models.values()))["range"],
            " / ".join(counts) if len(set(counts)) > 1 else counts[0],
            digits(models[first]["nats"], ".4f") if first in models else "",
        ]
        for label in others:
            if label in models:
                row = models[label]
                line.append(with_interval(row["difference"], row["difference_interval"]))
            else:
                line.append("")
        lines.append(line)
    return lines


def how_intervals_are_made(result: dict[str, Any]) -> list[str]:
    """What an interval counts, and where all of it was measured."""
    parts = [
        "## How intervals are made",
        "Documents are what varies, as neighbouring tokens are alike: an interval holds the middle "
        "of the means over sets of documents drawn with replacement, 95% of them for many "
        "documents, and more for few, as far out as Student's t asks (the expanded percentile "
        "interval of Hesterberg, arXiv 1411.5279). For a difference the same "
        "documents are drawn for both models, whose means are then subtracted, so that documents "
        "which are hard for both cancel. Where both models have "
        "several seeds, the interval over these is added in quadrature. Differences are over the "
        "seeds that both models have, in pairs, by Student's t; where they share none, or one of "
        "several, over all, by Welch's standard error with the degrees of freedom of the fewer "
        "seeds. Intervals of losses count documents alone. "
        "Documents of unequal length count as fewer of equal length, and where these are fewer "
        f"than {LEAST_DOCUMENTS}, there is no interval.",
    ]
    here = result.get("environment")
    if here:
        parts.append(
            f"This report was made by `{here['command']}` on {here['device'] or 'a CPU'}, "
            f"torch {here['torch']}, commit {here['commit']}, {here['date']}."
        )
    return parts


def _losses(rows: list[Row], *, with_stride: bool) -> str:
    """Rows of `chunk`, whose stride is the history, or of `strided`."""
    header = ["model", "history", *(["stride"] if with_stride else []), "documents", "tokens"]
    header += ["nats", "perplexity", "bits/byte", "difference, nats", "seeds apart, nats"]
    lines = []
    for row in rows:
        seeds = row["nats_of_seeds"]
        known = len(seeds) > 1 and is_known(*seeds)
        lines.append(
            [
                row["label"],
                f"{row['history']:,}",
                *([f"{row['stride']:,}"] if with_stride else []),
                documents(row),
                f"{row['tokens']:,}",
                with_interval(row["nats"], row["nats_interval"]),
                digits(row["perplexity"], ".2f"),
                digits(row["bits_per_byte"], ".4f"),
                difference_of(row),
                digits(max(seeds) - min(seeds), ".4f") if known else "-",
            ]
        )
    return markdown_table(header, lines).rstrip()


def _compared_with(rows: list[Row]) -> str:
    found = [row["difference"] for row in rows if row["difference"]]
    names = [f"{d['to_label']} with {d['to_history']:,} tokens of history" for d in found]
    if not names:
        return "In brackets: 95% intervals."
    return (
        f"In brackets: 95% intervals. Differences are to {' or '.join(dict.fromkeys(names))}, "
        "documents alike (-: there was nothing such); seeds apart: from the lowest to the highest."
    )

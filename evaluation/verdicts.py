"""What an evaluation's report says in words: the sentences at its top, and each difference.

A loss is called lower or higher only where the 95% interval of the difference leaves out zero.
"""

from typing import Any

from evaluation.markdown import digits, is_known, with_interval
from evaluation.results import Row
from evaluation.sums import LEAST_SEEN


def verdicts(result: dict[str, Any]) -> list[str]:
    """A list with a sentence for each model but the first, and what their intervals leave out."""
    first, *others = dict.fromkeys(run["label"] for run in result["runs"])
    compared = _compared(result, first)
    lines = [
        _verdict(result, *compared[label])
        if label in compared
        else f"- **{label} against {first}**: not scored in the same way."
        for label in others
    ]
    if not lines:
        return []
    single = [label for label, (_, row, _) in compared.items() if row["difference"]["seeds"] == 1]
    if not single:
        return ["\n".join(lines)]
    return [
        "\n".join(lines),
        f"Compared over one seed: {', '.join(single)}. There the interval counts documents but not "
        "seeds: how far another training would lie is not known.",
    ]


def unfinished(runs: list[Row]) -> list[str]:
    """A sentence on models whose training had not come to its end, if there are any."""
    # a step of 0: imported weights, which were not trained here
    early = {
        f"{run['label']} (step {run['step']:,} of {run['max_steps']:,})": None
        for run in runs
        if 0 < run["step"] < run.get("max_steps", 0)  # which early results do not tell
    }
    return [f"Not trained to the end: {', '.join(early)}."] if early else []


def verdict(difference: Row) -> str:
    """A difference with its interval in words: lower, higher, or that none is shown."""
    nats, (low, high) = difference["nats"], difference["interval"]
    if not _is_shown(difference):
        between = f" ({low:z.4f} to {high:z.4f})" if is_known(low, high) else ""
        return f"no difference shown: {digits(nats, 'z.4f')} nats{between}"
    if nats < 0:
        low, high = -high, -low
    word = "lower" if nats < 0 else "higher"
    return f"{abs(nats):.4f} nats {word} ({low:.4f} to {high:.4f})"


def difference_of(row: Row) -> str:
    """What a row differs by from the one it is compared with, itself perhaps."""
    difference = row["difference"]
    return with_interval(difference["nats"], difference["interval"]) if difference else "-"


def documents(row: Row) -> str:
    """How a model was trained or scored."""
    return "masked" if row["document_mask"] else "packed"


def _compared(result: dict[str, Any], first: str) -> dict[str, tuple[str, Row, Row]]:
    """By model the table that compares it with the first, each as it was trained, and both rows.

    By windows that slide, if both were scored by such.
    """
    compared = {}
    for table in ("as_trained_chunk", "as_trained"):
        rows = {row["label"]: row for row in result[table]}
        if first in rows:
            compared |= {
                label: (table, row, rows[first]) for label, row in rows.items() if row["difference"]
            }
    return compared


def _verdict(result: dict[str, Any], table: str, row: Row, versus: Row) -> str:
    """The sentence on a model."""
    label, first = row["label"], versus["label"]
    difference, histories = row["difference"], (row["history"], versus["history"])
    contexts = {run["label"]: run["context_length"] for run in result["runs"]}
    if table == "as_trained_chunk":
        how = "as the paper evaluates, which flatters the longer context, each in its own windows"
    elif histories == (contexts[label], contexts[first]):
        how = f"each with at least {LEAST_SEEN} of its context"
    else:
        how = f"with {histories[0]:,} against {histories[1]:,} tokens of history"
    on = f", on {difference['tokens']:,} identical tokens" if table == "as_trained" else ""
    text = (
        f"- **{label} against {first}**, {how}{_documents(row, versus)}{on}: "
        f"{verdict(difference)}; perplexity {digits(row['perplexity'], '.2f')} against "
        f"{digits(versus['perplexity'], '.2f')}"
    )
    less = _with_less(result["strided"], row, versus) if table == "as_trained" else None
    if less is not None:
        text += f"; {_remainder(difference, less['difference'], label, less['history'])}"
    return text + "."


def _documents(row: Row, versus: Row) -> str:
    """What a token saw before its document, where that was not all for both."""
    ways = dict.fromkeys((documents(row), documents(versus)))
    return "" if list(ways) == ["packed"] else f", documents {' against '.join(ways)}"


def _with_less(rows: list[Row], row: Row, versus: Row) -> Row | None:
    """The row of the same model with the history of `versus`, compared with just that one."""
    if row["document_mask"] != versus["document_mask"] or row["history"] <= versus["history"]:
        return None
    wanted = {key: row[key] for key in ("label", "document_mask")}
    wanted["history"] = versus["history"]
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
    ends = sorted(abs(end) for end in rest["interval"])
    return (
        f"of that, {abs(rest['nats']):z.4f} nats ({ends[0]:z.4f} to {ends[1]:z.4f}) remain {when}"
    )


def _is_shown(difference: Row) -> bool:
    """Whether the interval leaves out zero."""
    low, high = difference["interval"]
    return is_known(low, high) and (low > 0 or high < 0)

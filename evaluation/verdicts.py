"""The sentences of an evaluation's report: on each model, and on each difference.

A loss is called lower or higher only where the 95% interval of the difference leaves out zero.
"""

from typing import Any

from evaluation.markdown import digits, is_known, with_interval
from evaluation.results import Row
from evaluation.sums import LEAST_SEEN


def verdicts(result: dict[str, Any]) -> list[str]:
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
    if not single:
        return ["\n".join(lines)]
    return [
        "\n".join(lines),
        f"Compared over one seed, by intervals over documents alone: {', '.join(single)}.",
    ]


def unfinished(runs: list[Row]) -> list[str]:
    """A sentence on models whose training had not come to its end, if there are any."""
    # a step of 0: imported weights, which were not trained here
    early = [
        f"{run['label']} (step {run['step']:,} of {run['max_steps']:,})"
        for run in runs
        if 0 < run["step"] < run.get("max_steps", 0)  # which early results do not tell
    ]
    return [f"Not trained to the end: {', '.join(dict.fromkeys(early))}."] if early else []


def verdict(difference: Row) -> str:
    """A difference with its interval in words: lower, higher, or that none is shown."""
    nats, (low, high) = difference["nats"], difference["interval"]
    if not _is_shown(difference):
        between = f" ({low:z.4f} to {high:z.4f})" if is_known(low, high) else ""
        return f"no difference shown: {digits(nats, 'z.4f')} nats{between}"
    low, high = sorted((abs(low), abs(high)))
    word = "lower" if nats < 0 else "higher"
    return f"{abs(nats):.4f} nats {word} ({low:.4f} to {high:.4f})"


def difference_of(row: Row) -> str:
    """The difference of a row to what it is compared with, a dash for that row itself."""
    difference = row["difference"]
    return with_interval(difference["nats"], difference["interval"]) if difference else "-"


def documents(row: Any) -> str:
    """How a model was trained or scored."""
    return "masked" if row["document_mask"] else "packed"


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
    ways = list(dict.fromkeys((documents(row), documents(versus))))
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

"""The sentences at the top of an evaluation's report, and how all of it writes numbers.

A loss is called lower or higher only where the 95% interval of the difference leaves out zero.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from scripts.results import Row


def verdicts(result: dict[str, Any]) -> list[str]:
    """A list with a sentence for each model but the first, and what their intervals leave out."""
    contexts = {run["label"]: run["context_length"] for run in result["runs"]}
    seeds = Counter(run["label"] for run in result["runs"])
    first, *others = contexts
    lines = []
    for label in others:
        for name in ("strided", "chunk"):
            row = _fullest(result[name], label, first)
            if row is not None:
                lines.append(_verdict(result[name], row, contexts))
                break
        else:
            lines.append(f"- **{label} against {first}**: not scored in the same way.")
    if not lines:
        return []
    single = [label for label, count in seeds.items() if count == 1]
    if not single:
        return ["\n".join(lines)]
    return [
        "\n".join(lines),
        f"Of one seed alone: {', '.join(single)}. Where one of two models is, the interval of "
        "their difference counts documents but not seeds: how far another training would lie is "
        "not known.",
    ]


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


def with_interval(mean: float | None, interval: Sequence[float | None]) -> str:
    """A mean, nats, with its interval if there is one."""
    low, high = interval
    if not is_known(low, high):
        return digits(mean, "z.4f")
    return f"{digits(mean, 'z.4f')} ({low:z.4f} to {high:z.4f})"


def difference_of(row: Row) -> str:
    """What a row differs by from the one it is compared with, itself perhaps."""
    difference = row["difference"]
    return with_interval(difference["nats"], difference["interval"]) if difference else "-"


def digits(value: float | None, how: str) -> str:
    """A number in the given format, of which z writes no -0.0; a dash where it is not known."""
    return format(value, how) if is_known(value) else "-"


def is_known(*numbers: float | None) -> bool:
    """Whether none of them is NaN, or null as in JSON."""
    return all(number is not None and not math.isnan(number) for number in numbers)


def _fullest(rows: list[Row], label: str, first: str) -> Row | None:
    """A model's row with the longest history, then smallest stride, packed if there is a choice."""
    compared = [
        row
        for row in rows
        if row["label"] == label and (row["difference"] or {}).get("to_label") == first
    ]
    return min(
        compared,
        key=lambda row: (row["document_mask"], -row["history"], row["stride"]),
        default=None,
    )


def _verdict(rows: list[Row], row: Row, contexts: dict[str, int]) -> str:
    """The sentence on a row, which comes from `_fullest`."""
    difference, label = row["difference"], row["label"]
    first, history = difference["to_label"], difference["to_history"]
    as_paper = row["first"] == 0
    alike = [
        other
        for other in rows
        if other["document_mask"] == row["document_mask"]
        and (as_paper or other["stride"] == row["stride"])
    ]
    versus = next(o for o in alike if (o["label"], o["history"]) == (first, history))
    if as_paper:
        how = "as the paper evaluates, which flatters the longer context"
    elif (row["history"], history) == (contexts[label], contexts[first]):
        how = "each with its full context"
    else:
        how = f"with {row['history']:,} against {history:,} tokens of history"
    how += ", documents masked" if row["document_mask"] else ""
    text = (
        f"- **{label} against {first}**, {how}, on {difference['tokens']:,} identical tokens: "
        f"{verdict(difference)}; perplexity {digits(row['perplexity'], '.2f')} against "
        f"{digits(versus['perplexity'], '.2f')}"
    )
    for less in alike:
        if less["label"] == label and less["history"] == history < row["history"]:
            text += f"; {_remainder(difference, less['difference'], label, history)}"
    return text + "."


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

"""Questions that models of Table 4 answer in pairs, and the answers as a table and a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.markdown import dict_table, with_interval
from evaluation.pictures import differences_by_bin
from evaluation.results import Row
from evaluation.style import save
from experiments.table4.models import MODELS


class Question(NamedTuple):
    """What a model tells when it is compared with another."""

    asks: str
    pairs: tuple[tuple[str, str], ...]
    """Of a model and what it is compared with."""
    panel: str | None = None
    """Of the picture by position in the document, if it is drawn there."""


CONTEXT, BUTTERFLY = "a longer context", "butterfly instead of dense attention"

QUESTIONS = (
    Question(
        "longer context from scratch, equal tokens",
        (
            *((long, "1k") for long in ("2k", "4k", "8k", "16k")),
            ("4k_learned", "1k_learned"),
            ("4k_documents", "1k_documents"),
        ),
        CONTEXT,
    ),
    Question(
        "the batches of the longer context, 1K attention",
        (("1k_of_4k", "1k"), ("1k_then_1k_of_4k", "1k_then_1k")),
        CONTEXT,
    ),
    Question(
        "the longer attention, same batches",
        (("4k", "1k_of_4k"), ("1k_then_4k", "1k_then_1k_of_4k")),
        CONTEXT,
    ),
    Question("longer context from scratch, equal time", (("4k", "1k_same_time"),)),
    Question(
        "longer context for a trained 1K model, equal tokens",
        (
            ("1k_then_4k", "1k_then_1k"),
            ("1k_then_4k_butterfly", "1k_then_1k"),
            ("1k_then_16k", "1k_then_1k"),
            ("1k_then_16k_butterfly", "1k_then_1k"),
            ("1k_then_16k", "1k_then_4k"),
        ),
        CONTEXT,
    ),
    Question(
        "longer context for a trained 1K model, equal time",
        (("1k_then_4k", "1k_then_1k_same_time"),),
        CONTEXT,
    ),
    Question(
        "a trained 1K model instead of from scratch, equal time",
        (("4k_from_1k", "4k"), ("4k_learned_from_1k", "4k_learned")),
    ),
    Question(
        "butterfly instead of dense, equal tokens",
        tuple((f"{name}_butterfly", name) for name in ("4k", "16k", "1k_then_4k", "1k_then_16k")),
        BUTTERFLY,
    ),
    Question(
        "butterfly instead of dense, equal time",
        tuple((f"{name}_butterfly_same_time", name) for name in ("4k", "16k", "1k_then_16k")),
        BUTTERFLY,
    ),
    Question(
        "documents masked instead of packed, equal tokens",
        tuple((f"{name}_documents", name) for name in ("1k", "4k", "1k_then_4k")),
    ),
)

QUESTION_OF = {pair: question for question in QUESTIONS for pair in question.pairs}
PAIRS = tuple(pair for question in QUESTIONS for pair in question.pairs)


def comparisons_table(comparisons: Sequence[Row]) -> str:
    """Every question with the differences that answer it, as `evaluation.tables.compare` gave them.

    Markdown; one at least.
    """
    return dict_table(
        {
            "question": QUESTION_OF[row["label"], row["to_label"]].asks,
            "model": row["label"],
            "minus": row["to_label"],
            "seeds": str(row["strided"]["seeds"]),
            "as the paper evaluates, nats": nats(row["chunk"]),
            "on identical tokens, nats": nats(row["strided"]),
            **{f"of these {p['range']} tokens into a document": nats(p) for p in row["parts"]},
        }
        for row in comparisons
    )


def answers_table(larger: Mapping[str, Any], smaller: Mapping[str, Any]) -> str:
    """Differences between the models, after more and after less training.

    Each result has a single corpus.
    """
    more, less = (
        {(row["label"], row["to_label"]): row for row in next(iter(result["comparisons"].values()))}
        for result in (larger, smaller)
    )
    none = {"chunk": None, "strided": None}
    return dict_table(
        {
            "question": QUESTION_OF[pair].asks,
            "model": pair[0],
            "minus": pair[1],
            "larger budget, as the paper evaluates": nats(more.get(pair, none)["chunk"]),
            "larger budget, on identical tokens": nats(more.get(pair, none)["strided"]),
            "smaller budget, on identical tokens": nats(less.get(pair, none)["strided"]),
            "seeds of these": str(less[pair]["strided"]["seeds"]) if pair in less else "",
        }
        for pair in PAIRS
        if pair in more or pair in less
    )


def nats(difference: Row | None) -> str:
    """A difference with its interval; nothing for none."""
    return "" if difference is None else with_interval(difference["nats"], difference["interval"])


def draw_positions(comparisons: Sequence[Row], out: Path) -> None:
    """Draw the differences by position in the document; a picture of others must not stay."""
    panels: dict[str, dict[str, list[Row]]] = {}
    for row in comparisons:
        label, other = row["label"], row["to_label"]
        panel = QUESTION_OF[label, other].panel
        if panel == CONTEXT:  # of models from scratch differences are far larger
            scratch = MODELS[other].starts_from is None
            panel = f"{panel}, {'from scratch' if scratch else 'going on'}"
        if panel is not None:
            panels.setdefault(panel, {})[f"{label} minus {other}"] = row["document_position"]
    if panels:
        save(differences_by_bin(panels, "tokens before the scored one in its document"), out)
    else:
        out.unlink(missing_ok=True)

"""Which of the models of Table 4 answer a question together, and what they say."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.markdown import markdown_table, with_interval
from evaluation.pictures import differences_by_bin
from evaluation.style import save
from experiments.table4.models import MODELS


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a model tells when it is compared with another."""

    asks: str
    pairs: tuple[tuple[str, str], ...]
    """Of a model and what it is compared with."""
    panel: str | None = None
    """Of the picture by position in the document, if it is drawn there."""


CONTEXT, BUTTERFLY = "a longer context", "butterfly instead of dense attention"

QUESTIONS = (
    Question(
        asks="longer context from scratch, equal tokens",
        pairs=(
            *((long, "1k") for long in ("2k", "4k", "8k", "16k")),
            ("4k_learned", "1k_learned"),
            ("4k_documents", "1k_documents"),
        ),
        panel=CONTEXT,
    ),
    Question(
        asks="the batches of the longer context, 1K attention",
        pairs=(("1k_of_4k", "1k"), ("1k_then_1k_of_4k", "1k_then_1k")),
        panel=CONTEXT,
    ),
    Question(
        asks="the longer attention, same batches",
        pairs=(("4k", "1k_of_4k"), ("1k_then_4k", "1k_then_1k_of_4k")),
        panel=CONTEXT,
    ),
    Question(asks="longer context from scratch, equal time", pairs=(("4k", "1k_same_time"),)),
    Question(
        asks="longer context for a trained 1K model, equal tokens",
        pairs=(
            *(
                (f"1k_then_{long}", "1k_then_1k")
                for long in ("4k", "4k_butterfly", "16k", "16k_butterfly")
            ),
            ("1k_then_16k", "1k_then_4k"),
        ),
        panel=CONTEXT,
    ),
    Question(
        asks="longer context for a trained 1K model, equal time",
        pairs=(("1k_then_4k", "1k_then_1k_same_time"),),
        panel=CONTEXT,
    ),
    Question(
        asks="a trained 1K model instead of from scratch, equal time",
        pairs=(("4k_from_1k", "4k"), ("4k_learned_from_1k", "4k_learned")),
    ),
    Question(
        asks="butterfly instead of dense, equal tokens",
        pairs=tuple(
            (f"{dense}_butterfly", dense) for dense in ("4k", "16k", "1k_then_4k", "1k_then_16k")
        ),
        panel=BUTTERFLY,
    ),
    Question(
        asks="butterfly instead of dense, equal time",
        pairs=tuple(
            (f"{dense}_butterfly_same_time", dense) for dense in ("4k", "16k", "1k_then_16k")
        ),
        panel=BUTTERFLY,
    ),
    Question(
        asks="documents masked instead of packed, equal tokens",
        pairs=tuple((f"{packed}_documents", packed) for packed in ("1k", "4k", "1k_then_4k")),
    ),
)

PAIRS = tuple(pair for question in QUESTIONS for pair in question.pairs)
QUESTION_OF = {pair: question for question in QUESTIONS for pair in question.pairs}


def comparisons_table(comparisons: Iterable[dict[str, Any]]) -> str:
    """Markdown: every question with the differences that answer it.

    Args:
        comparisons: as `evaluation.tables.compare` gave them for PAIRS; one at least.
    """
    comparisons = list(comparisons)
    parts = [part["range"] for part in comparisons[0]["parts"]]
    return markdown_table(
        [
            *("question", "model", "minus", "seeds"),
            *("as the paper evaluates, nats", "on identical tokens, nats"),
            *(f"of these {part} tokens into a document" for part in parts),
        ],
        [
            [
                QUESTION_OF[row["label"], row["to_label"]].asks,
                row["label"],
                row["to_label"],
                str(row["strided"]["seeds"]),
                *(
                    with_interval(row[how]["nats"], row[how]["interval"])
                    for how in ("chunk", "strided")
                ),
                *(with_interval(part["nats"], part["interval"]) for part in row["parts"]),
            ]
            for row in comparisons
        ],
    )


def draw_positions(comparisons: Iterable[dict[str, Any]], out: Path) -> None:
    """Draw the differences by position in the document; a picture of others must not stay."""
    panels: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in comparisons:
        panel = _panel_of(row["label"], row["to_label"])
        if panel is not None:
            name = f"{row['label']} minus {row['to_label']}"
            panels.setdefault(panel, {})[name] = row["document_position"]
    if panels:
        save(differences_by_bin(panels, "tokens before the scored one in its document"), out)
    else:
        out.unlink(missing_ok=True)


def _panel_of(label: str, to_label: str) -> str | None:
    """Differences between models from scratch are far larger than those between others."""
    panel = QUESTION_OF[label, to_label].panel
    if panel != CONTEXT:
        return panel
    return f"{panel}, {'from scratch' if MODELS[to_label].starts_from is None else 'going on'}"

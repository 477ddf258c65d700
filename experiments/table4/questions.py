"""Questions of our Table 4, and the pairs of models that answer them."""

from typing import NamedTuple

from evaluation.results import Row
from experiments.harness import Result
from experiments.table4.parts import PAIRS_OF_PARTS


class Question(NamedTuple):
    """One question, answered by comparing pairs of models."""

    asks: str
    pairs: tuple[tuple[str, str], ...]
    """Pairs of a model and its baseline."""
    by_position: bool = False
    """Also draw the differences by position in the document."""


QUESTIONS = (
    Question(
        "longer context from scratch, equal tokens",
        (
            *((long, "1k") for long in ("2k", "4k", "8k", "16k")),
            ("4k_learned", "1k_learned"),
            ("4k_documents", "1k_documents"),
        ),
        by_position=True,
    ),
    Question(
        "batches of the longer context, 1K attention",
        (("1k_of_4k", "1k"), ("1k_then_1k_of_4k", "1k_then_1k")),
        by_position=True,
    ),
    Question(
        "longer attention, same batches",
        (("4k", "1k_of_4k"), ("1k_then_4k", "1k_then_1k_of_4k")),
        by_position=True,
    ),
    Question(
        "a context that grows in one run, equal tokens",
        (
            *(("1k_to_4k", other) for other in ("1k", "4k")),
            *(("1k_to_16k", other) for other in ("1k", "1k_to_4k")),
            ("1k_to_4k_modern", "4k_modern"),
        ),
        by_position=True,
    ),
    Question(
        "other positions, or a constant learning rate, while the context grows, equal tokens",
        tuple((f"1k_to_4k_{name}", "1k_to_4k") for name in ("yarn", "fixed_base", "wsd")),
    ),
    Question(
        "a context that grows in one run instead of in two, equal tokens",
        (("1k_to_4k_longer", "1k_then_4k"),),
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
        by_position=True,
    ),
    Question(
        "longer context for a trained 1K model, equal time",
        (("1k_then_4k", "1k_then_1k_same_time"),),
        by_position=True,
    ),
    Question(
        "start from a trained 1K model instead of from scratch, equal time",
        (("4k_from_1k", "4k"), ("4k_learned_from_1k", "4k_learned")),
    ),
    Question(
        "butterfly mask instead of dense, equal tokens",
        tuple((f"{name}_butterfly", name) for name in ("4k", "16k", "1k_then_4k", "1k_then_16k")),
        by_position=True,
    ),
    Question(
        "butterfly mask instead of dense, equal time",
        tuple((f"{name}_butterfly_same_time", name) for name in ("4k", "16k", "1k_then_16k")),
        by_position=True,
    ),
    Question(
        "document mask instead of plain packing, equal tokens",
        tuple((f"{name}_documents", name) for name in ("1k", "4k", "1k_then_4k")),
    ),
    Question(
        "a modern recipe instead of GPT-2's, equal tokens",
        tuple((name, "4k") for name in ("4k_modern", "4k_modern_adamw", "4k_muon", "recipe")),
    ),
    Question(
        "a modern recipe instead of GPT-2's, equal time",
        (("4k_modern_same_time", "4k"), ("recipe_same_time", "4k")),
        by_position=True,
    ),
    Question("a learning rate of 3e-3 instead of 1e-3, equal tokens", (("4k_same_lr", "4k"),)),
    Question(
        "the modern recipe for the time of GPT-2's, instead of for its tokens",
        (("recipe_same_time", "recipe"),),
    ),
    Question("one part of the modern recipe, or one more, equal tokens", PAIRS_OF_PARTS),
    Question(
        "a batch that grows from 32,768 to 131,072 tokens, equal tokens",
        (("recipe_growing_batch_131k", "recipe"),),
    ),
    Question(
        "a batch that grows from 32,768 to 131,072 tokens, equal tokens at each context",
        (("recipe_growing_batch_131k_same_contexts", "recipe"),),
    ),
)

QUESTION_OF = {pair: question for question in QUESTIONS for pair in question.pairs}
PAIRS = tuple(pair for question in QUESTIONS for pair in question.pairs)


def by_pair(result: Result) -> dict[tuple[str, str], Row]:
    """Comparisons by pair of models, from a result with a single corpus."""
    (rows,) = result["comparisons"].values()
    return {(row["label"], row["to_label"]): row for row in rows}

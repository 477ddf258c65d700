"""The tables of Table 4 in README.md and docs, of results with a single corpus."""

from collections.abc import Mapping
from typing import Any

from evaluation.markdown import with_interval
from experiments.reports import table
from experiments.table4.questions import PAIRS, QUESTION_OF

Result = Mapping[str, Any]


def models_table(result: Result) -> str:
    """Cost and perplexity of each model."""
    (rows,) = result["rows"].values()
    return table(
        {
            "model": row["label"],
            "seeds": str(row["seeds"]),
            "tokens": f"{row['tokens'] / 1e6:,.0f}M",
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "time": f"{row['gpu_hours'] / rows[0]['gpu_hours']:.2f}",
            "perplexity, as the paper evaluates": f"{row['paper_perplexity']:.2f}",
            "perplexity, on identical tokens": f"{row['perplexity']:.2f}",
        }
        for row in rows
    )


def answers_table(larger: Result, smaller: Result) -> str:
    """Differences between the models, after more and after less training."""
    more, less = _comparisons(larger), _comparisons(smaller)
    return table(
        {
            "question": QUESTION_OF[pair].asks,
            "model": pair[0],
            "minus": pair[1],
            "larger budget, as the paper evaluates": _difference(more.get(pair), "chunk"),
            "larger budget, on identical tokens": _difference(more.get(pair), "strided"),
            "smaller budget, on identical tokens": _difference(less.get(pair), "strided"),
            "seeds of these": str(less[pair]["strided"]["seeds"]) if pair in less else "",
        }
        for pair in PAIRS
        if pair in more or pair in less
    )


def _comparisons(result: Result) -> dict[tuple[str, str], Any]:
    (rows,) = result["comparisons"].values()
    return {(row["label"], row["to_label"]): row for row in rows}


def _difference(row: Mapping[str, Any] | None, how: str) -> str:
    return "" if row is None else with_interval(row[how]["nats"], row[how]["interval"])

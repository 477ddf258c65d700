"""The table of docs/reliability.md: what `python -m tests.reliability` tried, and what failed."""

from collections.abc import Mapping
from typing import Any

from experiments.reports import table


def reliability_table(result: Mapping[str, Any]) -> str:
    """A line for each thing that was tried, in Markdown."""
    return table(
        {"what": row["what"], "tries": str(row["tries"]), "failed": str(row["failed"])}
        for row in result["rows"]
    )

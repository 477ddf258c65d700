"""The table of docs/reliability.md."""

from collections.abc import Mapping
from typing import Any

from experiments.reports import table

KINDS = ("silent", "traceback", "hang", "leak")
"""First words of failures: what nobody notices, an error that is not a sentence, an endless wait,
and what was read or run that must not be. A failure that begins otherwise counts as silent."""


def reliability_table(result: Mapping[str, Any]) -> str:
    """A line for each thing that was tried, with how many failures of each kind, in Markdown."""
    return table(
        {"what": row["what"], "tries": str(row["tries"]), **_counts(row["failures"])}
        for row in result["rows"]
    )


def _counts(failures: list[str]) -> dict[str, str]:
    labels = [failure.partition(":")[0] for failure in failures]
    kinds = [label if label in KINDS else KINDS[0] for label in labels]
    return {kind: str(kinds.count(kind)) for kind in KINDS}

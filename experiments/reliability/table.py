"""Table of docs/reliability.md."""

from collections.abc import Mapping
from typing import Any

from evaluation.markdown import dict_table

_DISPLAYED = {
    "somebody's run": "untrusted run",
    "cut files": "truncated files",
    "ruined weights": "corrupted weights",
}

KINDS = ("silent", "traceback", "hang", "leak")
"""First words of failures: an unnoticed error, an error without a plain message, an endless wait,
and data or code that must not be read or run. A failure with another first word counts as
silent."""


def reliability_table(result: Mapping[str, Any]) -> str:
    """Markdown table: one row per kind of fault, with the number of failures of each kind."""
    return dict_table(
        {
            "fault": display_fault(row["what"]),
            "tries": str(row["tries"]),
            **_counts(row["failures"]),
        }
        for row in result["rows"]
    )


def display_fault(fault: str) -> str:
    """Name of a fault in the table; results store the wording on the left."""
    for stored, shown in _DISPLAYED.items():
        fault = fault.replace(stored, shown)
    return fault


def _counts(failures: list[str]) -> dict[str, str]:
    labels = [failure.partition(":")[0] for failure in failures]
    kinds = [label if label in KINDS else KINDS[0] for label in labels]
    return {kind: str(kinds.count(kind)) for kind in KINDS}

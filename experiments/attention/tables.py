"""The tables of experiments.attention."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from evaluation.results import Row

# Heading and format of a number in a table, by its key in a row
COLUMNS = {
    "density": ("density", ".3f"),
    "forward_tflops": ("fwd TF/s", ".0f"),
    "backward_tflops": ("bwd TF/s", ".0f"),
    "forward_ms": ("fwd ms", ".3f"),
    "backward_ms": ("bwd ms", ".3f"),
    "both_ms": ("both ms", ".3f"),
    "both_eager_ms": ("eager ms", ".3f"),
    "peak_mib": ("MiB", ",.0f"),
    "forward_over_best_peer": ("fwd x best", ".2f"),
    "backward_over_best_peer": ("bwd x best", ".2f"),
    "forward_over_proportional": ("fwd / density", ".2f"),
    "backward_over_proportional": ("bwd / density", ".2f"),
    "speedup": ("x dense", ".1f"),
    "paper_speedup": ("paper's", ".1f"),
}


def heading(row: Row) -> str:
    """The problem of a row, its block-sparse mask aside."""
    options = {"causal": row["causal"], "dropout": row["dropout_p"], "padded": row["padded"]}
    size = f"T {row['seq_len']:,}, D {row['head_dim']}"
    return ", ".join([size, *(name for name, on in options.items() if on)])


def label(row: Row) -> str:
    """The contender of a row, with its block-sparse mask."""
    return row["name"] if row["mask"] == "dense" else f"{row['name']}, {row['mask']}"


def show_rows(title: str, rows: list[Row], columns: Sequence[str], caption: str) -> None:
    """Print rows, with those of COLUMNS. What is not "ok" says so, and has no numbers."""
    table = Table(title=title, caption=caption)
    table.add_column("", no_wrap=True)
    for key in columns:
        table.add_column(COLUMNS[key][0], justify="right")
    table.add_column("error")
    last = None
    for row in rows:
        if (here := heading(row)) != last:
            table.add_section()
            table.add_row(f"[bold]{here}")
            last = here
        right = row["status"] == "ok"
        table.add_row(
            f"  {label(row)}",
            *(format(row[key], COLUMNS[key][1]) if right and key in row else "" for key in columns),
            f"{max(row['errors'].values()):.1e}" if right else row["status"],
        )
    Console(width=110).print(table)

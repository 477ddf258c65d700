"""Rows of experiments.attention: comparisons, terminal output, tables of the docs."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pandas as pd

from evaluation.markdown import dict_table
from evaluation.results import Row
from experiments.reports import display_name

PASSES = ("forward", "backward")

# ---- comparisons between rows


def dense_problem(row: Row) -> tuple[Any, ...]:
    """Key shared by rows that differ only in the contender and the block-sparse mask."""
    names = ("batch", "seq_len", "n_head", "head_dim", "dtype", "causal", "dropout_p", "padded")
    return tuple(row[name] for name in names)


def right_rows(rows: list[Row]) -> list[Row]:
    """Rows with a correct result, which alone have times."""
    return [row for row in rows if row["status"] == "ok"]


def _add_to_ours(rows: list[Row], key: str, is_peer: Callable[[Row], bool]) -> None:
    """Add to Papilio's rows the time of the fastest peer over ours, separately for each pass.

    If the passes were timed in ten rounds, the ratio is the median of theirs. Its interval, from
    the second lowest to the second highest, then contains the true median with 98% probability.
    """
    right = right_rows(rows)
    for row in (row for row in right if row["name"] == "ours"):
        problem = (*dense_problem(row), row["sparsity"])
        peers = [r for r in right if (*dense_problem(r), r["sparsity"]) == problem]
        peers = [peer for peer in peers if is_peer(peer)]
        for part in PASSES if peers else ():
            best = min(peers, key=lambda peer: peer[f"{part}_ms"])
            row[f"{part}_{key}"] = best[f"{part}_ms"] / row[f"{part}_ms"]
            if f"{part}_round_ms" in row:
                own, others = row[f"{part}_round_ms"], best[f"{part}_round_ms"]
                ratios = sorted(other / ours for ours, other in zip(own, others, strict=True))
                row[f"{part}_{key}"] = statistics.median(ratios)
                row[f"{part}_{key}_interval"] = [ratios[1], ratios[-2]]


def add_best_peer(rows: list[Row]) -> None:
    """Add to Papilio's rows their speed over the fastest peer's, separately for each pass."""
    _add_to_ours(rows, "over_best_peer", _is_other)


def _is_other(row: Row) -> bool:
    return not row["name"].startswith("ours") and not row["name"].endswith("deterministic")


def add_best_repeatable(rows: list[Row]) -> None:
    """Add the comparisons of --preset hopper: with the best peer, and the best that repeats."""
    add_best_peer(rows)
    _add_to_ours(rows, "over_best_repeatable", lambda row: _is_to_repeat(row) and row["repeats"])


def _is_to_repeat(row: Row) -> bool:
    """Whether a peer promises gradients that repeat bit for bit, if it serves the case.

    FlexAttention's do without being asked. Those of others may repeat by chance on small problems.
    """
    return row["name"].endswith("deterministic") or row["name"] == "FlexAttention"


def with_dense(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield pairs of a block-sparse row and Papilio's dense row of the same problem."""
    right = right_rows(rows)
    dense = {dense_problem(r): r for r in right if (r["name"], r["mask"]) == ("ours", "dense")}
    for row in right:
        if row["mask"] != "dense" and dense_problem(row) in dense:
            yield row, dense[dense_problem(row)]


def add_proportion(rows: list[Row]) -> None:
    """Add to block-sparse rows their time over (density x Papilio's dense time)."""
    for row, dense in with_dense(rows):
        for part in (*PASSES, "both"):
            share = row["density"] * dense[f"{part}_ms"]
            row[f"{part}_over_proportional"] = row[f"{part}_ms"] / share


def relate_butterflies(rows: list[Row]) -> None:
    """Add the comparisons of --preset butterfly: with the best peer, and with the density."""
    add_best_peer(rows)
    add_proportion(rows)


def add_portable(rows: list[Row]) -> None:
    """Add the block size to all rows, and to Papilio's the relative time of portable kernels."""
    for row in rows:
        row["block_size"] = row["sparsity"]["block_size"]
    _add_to_ours(rows, "portable_over_ours", lambda row: row["name"] == "ours, portable")


def add_over_block_sparse(rows: list[Row]) -> None:
    """Add to approximations their time over that of Papilio under the paper's mask."""
    right = right_rows(rows)
    sparse = {
        (row["seq_len"], row["causal"]): row["both_ms"]
        for row in right
        if row["name"] == "ours" and row["mask"] not in ("dense", "butterfly")
    }
    for row in right:
        key = row["seq_len"], row["causal"]
        if row["name"] != "ours" and key in sparse:
            row["over_block_sparse"] = row["both_ms"] / sparse[key]


# ---- on the terminal


def heading(row: Row) -> str:
    """Problem of a row, without its block-sparse mask."""
    options = {"causal": row["causal"], "dropout": row["dropout_p"], "padded": row["padded"]}
    size = f"T {row['seq_len']:,}, D {row['head_dim']}"
    return ", ".join([size, *(name for name, on in options.items() if on)])


def label(row: Row) -> str:
    """Contender of a row, with its block-sparse mask."""
    return row["name"] if row["mask"] == "dense" else f"{row['name']}, {row['mask']}"


def _text(rows: list[Row], columns: list[str]) -> str:
    """Format the `columns` of rows, and the status of each row."""
    frame = pd.DataFrame(rows).reindex(columns=["status", *columns])
    frame.insert(0, "problem", [heading(row) for row in rows])
    frame.insert(1, "contender", [label(row) for row in rows])
    frame.columns = frame.columns.str.replace("forward", "fwd").str.replace("backward", "bwd")
    return frame.to_string(index=False, na_rep="", float_format="{:,.4g}".format)


# Terminal output of each preset
_TIMES = ["forward_ms", "backward_ms"]
_PROPORTION = ["forward_over_proportional", "backward_over_proportional"]
_BEST_PEER = ["forward_over_best_peer", "backward_over_best_peer"]
_PORTABLE = ["forward_portable_over_ours", "backward_portable_over_ours"]
peers_text = partial(_text, columns=["forward_tflops", "backward_tflops", "peak_mib", *_BEST_PEER])
hopper_text = partial(
    _text,
    columns=[
        "repeats",
        "backward_tflops",
        "backward_over_best_peer",
        "backward_over_best_repeatable",
    ],
)
butterfly_text = partial(_text, columns=[*_TIMES, "peak_mib", *_BEST_PEER, *_PROPORTION])
blocks_text = partial(_text, columns=["block_size", *_TIMES, *_PORTABLE])
sparsity_text = partial(_text, columns=["density", *_TIMES, *_PROPORTION])
paper_text = partial(
    _text, columns=[*_TIMES, "both_ms", "both_eager_ms", "peak_mib", "speedup", "paper_speedup"]
)
approximate_text = partial(
    _text, columns=[*_TIMES, "both_ms", "both_eager_ms", "peak_mib", "over_block_sparse"]
)


# ---- tables of the docs


def dense_table(result: Row) -> str:
    """Dense attention of Papilio and its peers (--preset peers), in TFLOP/s."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in result["rows"]:
        if row["mask"] == "dense":
            line = lines.setdefault(dense_problem(row), _problem(row))
            line[display_name(row["name"])] = _both(row, "tflops", ".0f")
    return dict_table(line for line in lines.values() if len(line) > 4)  # at least one peer


def fastest(rows: list[Row]) -> list[Row]:
    """Rows of dense attention, without the peers that are slowed down to repeat their results."""
    return [r for r in rows if r["mask"] == "dense" and not r["name"].endswith("deterministic")]


def direction_table(result: Row, *, direction: str) -> str:
    """One direction of dense attention (--preset hopper), in TFLOP/s.

    `direction` is "forward" or "backward".
    """
    rows = fastest(result["rows"])
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault(dense_problem(row), _problem(row))
        line[display_name(row["name"])] = f"{row[f'{direction}_tflops']:.0f}"
    for row in rows:
        if row["name"] == "ours":
            ratio = _ratio(row, f"{direction}_over_best_peer", ".3f")
            lines[dense_problem(row)]["Papilio / best other"] = ratio
    return dict_table(lines.values())


def repeatable_table(result: Row) -> str:
    """Backward passes of --preset hopper that ought to repeat bit for bit, in TFLOP/s."""
    rows = [row for row in result["rows"] if row["name"] == "ours" or _is_to_repeat(row)]
    unknown = dict.fromkeys((display_name(row["name"]) for row in rows), "-")
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        problem = _problem(row)
        if row["mask"] != "dense":
            problem["mask"] += f", {row['mask']}"
        line = lines.setdefault((*dense_problem(row), row["mask"]), problem | unknown)
        tflops = f"{row['backward_tflops']:.0f}" if row["status"] == "ok" else "refused"
        differs = row["status"] == "ok" and not row["repeats"]
        line[display_name(row["name"])] = tflops + " (differs)" * differs
    ratios = {"best that repeats": "best_repeatable", "best of all": "best_peer"}
    for row in (row for row in rows if row["name"] == "ours"):
        for title, key in ratios.items():
            if f"backward_over_{key}" in row:
                line = lines[(*dense_problem(row), row["mask"])]
                line[f"Papilio / {title}"] = _ratio(row, f"backward_over_{key}", ".2f")
    return dict_table(lines.values(), "-")


def _ratio(row: Row, key: str, spec: str) -> str:
    """Format a ratio, with its interval if the row was timed in rounds."""
    interval = row.get(f"{key}_interval", [])
    ends = " to ".join(format(end, spec) for end in interval)
    return format(row[key], spec) + f" ({ends})" * bool(interval)


def butterfly_table(result: Row) -> str:
    """Full butterfly by all contenders that support it (--preset butterfly); forward / backward."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in result["rows"]:
        if row["mask"] != "butterfly":
            continue
        line = lines.setdefault(dense_problem(row), _problem(row))
        line[f"{display_name(row['name'])}, ms"] = _both(row, "ms", ".2f")
        if row["name"] == "ours" and "forward_over_proportional" in row:
            line["Papilio / (density x its dense time)"] = _both(row, "over_proportional", ".2f")
            line["best other / Papilio"] = _both(row, "over_best_peer", ".2f")
    return dict_table(line for line in lines.values() if len(line) > 4)  # at least one peer


def mask_price_table(result: Row) -> str:
    """Overhead of a mask that hides nothing, or one block (--preset butterfly)."""
    overhead = "time / (density x dense time)"
    return dict_table(
        _problem(row)
        | {"visible blocks": row["mask"], overhead: _both(row, "over_proportional", ".3f")}
        for row in result["rows"]
        if row["mask"].startswith("all")
    )


def blocks_table(result: Row) -> str:
    """Butterflies with several block sizes (--preset blocks); forward / backward."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in result["rows"]:
        problem = _problem(row) | {"block size": str(row["block_size"])}
        line = lines.setdefault((*dense_problem(row), row["block_size"]), problem)
        line[f"{display_name(row['name'])}, ms"] = _both(row, "ms", ".2f")
        if "forward_portable_over_ours" in row:
            line["portable / Papilio"] = _both(row, "portable_over_ours", ".2f")
    return dict_table(lines.values())


def paper_table(result: Row) -> str:
    """Figure 3 of the paper (--preset paper)."""
    lines: dict[int, dict[str, str]] = {}
    for row in result["rows"]:
        if row["variant"] != "plain":
            continue
        line = lines.setdefault(row["seq_len"], {"tokens": f"{row['seq_len']:,}"})
        sparse = "" if row["mask"] == "dense" else ", block-sparse"
        name = display_name(row["name"]) + sparse
        line[name] = row["status"]
        if row["status"] == "ok":
            line[name] = f"{row['both_ms']:,.2f} ms, {row['peak_mib']:,.0f} MiB"
        if row["mask"] != "dense":
            line["speedup over dense"] = f"{row['speedup']:.1f}"
            line["paper's speedup"] = f"{row['paper_speedup']:.1f}"
    return dict_table(lines.values())


def approximate_name(row: Row) -> str:
    """Name of a contender of --preset approximate, with its mask."""
    if row["name"] == "ours" and row["mask"] != "dense":
        mask = "butterfly" if row["mask"] == "butterfly" else "block-sparse"
    else:
        mask = ""
    parts = [display_name(row["name"]), mask, "causal" * row["causal"]]
    return ", ".join(part for part in parts if part)


def approximate_table(result: Row) -> str:
    """Time of both passes by length (--preset approximate), ms."""
    lines: dict[str, dict[str, str]] = {}
    for row in sorted(result["rows"], key=lambda row: row["seq_len"]):
        name = approximate_name(row)
        line = lines.setdefault(name, {"forward and backward, ms": name})
        if row["status"] == "ok":
            line[f"{row['seq_len']:,}"] = f"{row['both_ms']:,.2f}"
        elif not row["status"].startswith("not supported"):
            line[f"{row['seq_len']:,}"] = "OOM" if row["status"] == "out of memory" else "wrong"
    return dict_table(lines.values(), "-")


def approximate_verdict_table(result: Row) -> str:
    """The fastest approximation at each length, and those faster than dense attention."""
    problems: dict[tuple[bool, int], dict[str, Row]] = {}
    for row in right_rows(result["rows"]):
        if row["name"] != "ours" or row["mask"] == "dense":
            problems.setdefault((row["causal"], row["seq_len"]), {})[row["name"]] = row
    lines = []
    for (causal, seq_len), rows in sorted(problems.items()):
        dense = rows.pop("ours")["both_ms"]
        if not rows:
            continue
        best = min(rows.values(), key=lambda row: row["both_ms"])
        faster = [name.removesuffix(", compiled") for name in rows if rows[name]["both_ms"] < dense]
        lines.append(
            {
                "tokens": f"{seq_len:,}",
                "mask": "causal" if causal else "full",
                "fastest approximation": best["name"],
                "its time / Papilio's, block-sparse": f"{best['over_block_sparse']:.2f}",
                "its time / Papilio's, dense": f"{best['both_ms'] / dense:.2f}",
                "faster than dense": ", ".join(dict.fromkeys(faster)) or "none",
            }
        )
    return dict_table(lines)


def _problem(row: Row) -> dict[str, str]:
    mask = "causal" if row["causal"] else "full"
    return {"head_dim": str(row["head_dim"]), "mask": mask, "tokens": f"{row['seq_len']:,}"}


def _both(row: Row, quantity: str, spec: str) -> str:
    """Format a quantity of the forward and of the backward pass; the status if there is none."""
    if row["status"] != "ok":
        return row["status"].split(":")[0]
    return " / ".join(format(row[f"{part}_{quantity}"], spec) for part in PASSES)

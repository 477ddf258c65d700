"""Write the tables of README.md and of the pages in docs from the measurements in docs/results.

python -m experiments.pages

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`; NAME is one of TABLES.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from configs.command_line import help_if_asked
from evaluation.markdown import markdown_table, with_interval
from experiments.lra import tables
from experiments.pathx.report import read_yardsticks
from experiments.pathx.tables import accuracy_table, runs_table, yardsticks_table
from experiments.table4.questions import PAIRS, QUESTION_OF

PAGES = (Path("README.md"), Path("docs/evaluation.md"), Path("docs/lra.md"))
RESULTS = Path("docs/results")
COMPARED = {"1,024": "gpt2_small_1k", "4,096": "gpt2_small_4k"}

_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def train_speed() -> str:
    """Speed and memory of a training step, from `experiments.train_steps.speed`."""
    header = ["context", "attention", "tokens/s", "x nanoGPT, flash", "MFU, causal / full", "peak"]
    rows = _load("train_speed")["rows"]
    peer = {r["context_length"]: r["tokens_per_s"] for r in rows if r["name"] == "nanoGPT, flash"}
    return markdown_table(
        header,
        [
            [
                f"{row['context_length']:,}",
                row["name"],
                f"{row['tokens_per_s']:,.0f}",
                f"{row['tokens_per_s'] / peer[row['context_length']]:.2f}",
                f"{row['mfu']['causal']:.1%} / {row['mfu']['full']:.1%}",
                f"{row['peak_gib']:.1f} GiB",
            ]
            for row in rows
        ],
    )


def same_losses() -> str:
    """Runs on our attention and on PyTorch's, from `experiments.train_steps.same_losses`."""
    header = ["context", "run", "validation loss", "tokens/s", "MFU, causal / full", "peak"]
    rows = []
    for context, name in COMPARED.items():
        for run, values in _load(f"compare_training_{name}")["runs"].items():
            rows.append(
                [
                    context,
                    run.replace("triton", "ours, triton").replace("sdpa", "PyTorch, SDPA"),
                    f"{values['validation_loss']:.4f}",
                    f"{values['tokens_per_s']:,.0f}",
                    f"{values['mfu_causal']:.1%} / {values['mfu_full']:.1%}",
                    f"{values['memory_gib']:.1f} GiB",
                ]
            )
    return markdown_table(header, rows)


def noise() -> str:
    """How far those runs lie apart."""
    header = ["context", "gap, nats", "on the same attention", "on ours and PyTorch's"]
    rows = []
    for context, name in COMPARED.items():
        gaps = _load(f"compare_training_{name}")["distances"]
        for what, title in (("curve", "training curve, mean"), ("validation", "validation, final")):
            same, different = (
                f"{gaps[kind][what]:.4f} ({gaps[kind]['pairs']} pairs)"
                for kind in ("same", "different")
            )
            rows.append([context, title, same.replace("(1 pairs)", "(1 pair)"), different])
    return markdown_table(header, rows)


def attention_speed() -> str:
    """Dense attention, ours and others', from `experiments.attention --preset peers`."""
    rows = [r for r in _load("attention_peers")["rows"] if r["mask"] == "dense"]
    peers = list(dict.fromkeys(r["name"] for r in rows))
    cells: dict[tuple[int, bool, int], dict[str, str]] = {}
    for r in rows:
        cells.setdefault(_problem(r), {})[r["name"]] = _both(r, "tflops", ".0f")
    return markdown_table(
        ["head_dim", "mask", "tokens", *peers],
        [
            [
                str(head_dim),
                "causal" if causal else "full",
                f"{seq_len:,}",
                *(by_name.get(name, "") for name in peers),
            ]
            for (head_dim, causal, seq_len), by_name in cells.items()
            if len(by_name) > 1
        ],
    )


def butterfly_speed() -> str:
    """A full butterfly, ours and FlexAttention's, from the same run."""
    rows = [r for r in _load("attention_peers")["rows"] if r["mask"] != "dense"]
    flex = {_problem(r): r for r in rows if r["name"] == "FlexAttention"}
    header = ["head_dim", "mask", "tokens", "density", "ours, ms", "FlexAttention, ms"]
    return markdown_table(
        [*header, "ours / (density x our dense time)"],
        [
            [
                str(r["head_dim"]),
                "causal" if r["causal"] else "full",
                f"{r['seq_len']:,}",
                f"{r['density']:.4f}",
                _both(r, "ms", ".2f"),
                _both(flex[_problem(r)], "ms", ".2f"),
                _both(r, "over_proportional", ".2f"),
            ]
            for r in rows
            if r["name"] == "ours"
        ],
    )


def paper_speedup() -> str:
    """The paper's Figure 3, from `experiments.attention --preset paper`."""
    rows = [r for r in _load("attention_paper")["rows"] if r["variant"] == "plain"]
    by_length: dict[int, dict[str, dict[str, Any]]] = {}
    for r in rows:
        name = r["name"] if r["mask"] == "dense" else "sparse"
        by_length.setdefault(r["seq_len"], {})[name] = r
    names = ("standard", "SDPA flash", "ours", "sparse")
    return markdown_table(
        [
            "tokens",
            "standard",
            "SDPA flash",
            "ours",
            "ours, block-sparse",
            "speed-up over dense",
            "the paper's",
        ],
        [
            [
                f"{seq_len:,}",
                *(_time_and_memory(row[name]) for name in names),
                f"{row['sparse']['speedup']:.1f}",
                f"{row['sparse']['paper_speedup']:.1f}",
            ]
            for seq_len, row in by_length.items()
        ],
    )


def table4() -> str:
    """What training took and what came of it, from `experiments.table4`."""
    header = ["model", "seeds", "tokens", "tokens/s", "time"]
    header += ["perplexity, as the paper evaluates", "perplexity, on identical tokens"]
    rows = _table4("hours")["rows"]
    return markdown_table(
        header,
        [
            [
                row["label"],
                str(row["seeds"]),
                f"{row['tokens'] / 1e6:,.0f}M",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['gpu_hours'] / rows[0]['gpu_hours']:.2f}",
                f"{row['paper_perplexity']:.2f}",
                f"{row['perplexity']:.2f}",
            ]
            for row in rows
        ],
    )


def table4_answers() -> str:
    """What the models tell about each other, after more and after less training."""
    header = ["question", "model", "minus"]
    header += ["larger budget, as the paper evaluates", "larger budget, on identical tokens"]
    header += ["smaller budget, on identical tokens", "seeds of these"]
    of_more, of_less = (
        {(row["label"], row["to_label"]): row for row in _table4(budget)["comparisons"]}
        for budget in ("hours", "minutes")
    )

    def difference(row: dict[str, Any] | None, how: str) -> str:
        return "" if row is None else with_interval(row[how]["nats"], row[how]["interval"])

    return markdown_table(
        header,
        [
            [
                *(QUESTION_OF[pair].asks, *pair),
                difference(of_more.get(pair), "chunk"),
                difference(of_more.get(pair), "strided"),
                difference(of_less.get(pair), "strided"),
                str(of_less[pair]["strided"]["seeds"]) if pair in of_less else "",
            ]
            for pair in PAIRS
            if pair in of_more or pair in of_less
        ],
    )


def _table4(budget: str) -> dict[str, Any]:
    """`rows` and `comparisons` of its only corpus."""
    report = _load(f"table4_{budget}")
    (rows,), (comparisons,) = (report[key].values() for key in ("rows", "comparisons"))
    return {"rows": rows, "comparisons": comparisons}


def _time_and_memory(row: dict[str, Any]) -> str:
    """Forward and backward: milliseconds of the GPU, and peak MiB."""
    if row["status"] != "ok":
        return row["status"]
    return f"{row['both_ms']:,.2f} ms, {row['peak_mib']:,.0f} MiB"


def _problem(row: dict[str, Any]) -> tuple[int, bool, int]:
    return row["head_dim"], row["causal"], row["seq_len"]


def _both(row: dict[str, Any], what: str, how: str) -> str:
    """A number of the forward and of the backward pass."""
    if row["status"] != "ok":
        return row["status"].split(":")[0]
    return " / ".join(format(row[f"{part}_{what}"], how) for part in ("forward", "backward"))


def pathx() -> str:
    """Accuracy on Path-X beside the paper's, from `experiments.pathx`."""
    return accuracy_table(_load("pathx"))


def pathx_runs() -> str:
    """What those runs took."""
    return runs_table(_load("pathx"))


def pathx_yardsticks() -> str:
    """What the markers' surroundings alone tell, from `experiments.contours.yardsticks`."""
    return yardsticks_table(read_yardsticks(RESULTS))


def tracing(name: str = "pathfinder_tracing") -> str:
    """Whether runs follow contours, from `experiments.contours.tracing`."""
    result = _load(name)
    control = result["matching"]["control"]
    header = ["run", "accuracy, %", "pairs", "pairs in order, %", "by geometry alone, %"]
    return markdown_table(
        header,
        [
            [
                Path(row["run"]).name,
                f"{100 * row['accuracy']['run']['accuracy']:.1f}",
                f"{row['pairs']:,}",
                *(
                    f"{100 * found['ordered']:.1f} ({low:.1f} to {high:.1f})"
                    for found in (row["on_pairs"]["run"], row["on_pairs"][control])
                    for low, high in [[100 * share for share in found["ordered_interval"]]]
                ),
            ]
            for row in result["rows"]
        ],
    )


def lra() -> str:
    """Accuracy on Long Range Arena beside the paper's, from `experiments.lra`."""
    return tables.accuracy_table(_load("lra"))


def lra_rotary() -> str:
    """The same of larger models with rotary positions."""
    return tables.accuracy_table(_load("lra_rotary"))


def lra_pretrained() -> str:
    """And of these, trained on hidden tokens first."""
    return tables.accuracy_table(_load("lra_pretrained"))


def lra_text() -> str:
    """Text in these two, at another learning rate, and without heads that begin at a neighbour."""
    trials = ["at_rest/lra_rotary", "at_rest/lra_pretrained"]
    trials += ["at_rest_5e-4/lra_rotary", "neighbour_5e-4/lra_rotary"]
    names = ["lra_rotary", "lra_pretrained", *(f"lra_text/{trial}" for trial in trials)]
    return tables.trials_table([_load(name) for name in names], "text")


def lra_speed() -> str:
    """Training steps with three attentions, from `experiments.lra.speed`."""
    return tables.speed_table(_load("lra"))


def pathfinder_speed() -> str:
    """Milliseconds in which one core makes an image, as `generator_speed` measured it."""
    rows = _load("pathfinder_speed")["rows"]
    times = {(row["size"], row["difficulty"]): row["ms_one_core"] for row in rows}
    sizes, difficulties = (list(dict.fromkeys(names)) for names in zip(*times, strict=True))
    return markdown_table(
        ["pixels", *difficulties],
        [[f"{n} x {n}", *(f"{times[n, name]:.2f} ms" for name in difficulties)] for n in sizes],
    )


TABLES: dict[str, Callable[[], str]] = {
    "train_speed": train_speed,
    "same_losses": same_losses,
    "noise": noise,
    "attention_speed": attention_speed,
    "butterfly_speed": butterfly_speed,
    "paper_speedup": paper_speedup,
    "table4": table4,
    "table4_answers": table4_answers,
    "pathx": pathx,
    "pathx_runs": pathx_runs,
    "pathx_yardsticks": pathx_yardsticks,
    "tracing": tracing,
    "tracing_32": partial(tracing, "pathfinder_tracing_32"),
    "lra": lra,
    "lra_rotary": lra_rotary,
    "lra_pretrained": lra_pretrained,
    "lra_text": lra_text,
    "lra_speed": lra_speed,
    "pathfinder_speed": pathfinder_speed,
}


def fill(text: str) -> str:
    """`text` with each table in its place written anew.

    Raises:
        KeyError: a place names no table of TABLES.
    """
    return _PLACE.sub(lambda place: place[1] + TABLES[place[2]]() + place[3], text)


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def main() -> None:
    """Run the command."""
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the tables of {', '.join(map(str, PAGES))}")


if __name__ == "__main__":
    help_if_asked(__doc__)
    main()

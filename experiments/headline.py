"""Headline results: the table of README.md, one question per row."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from evaluation.markdown import dict_table
from evaluation.results import Row
from experiments.attention.report import fastest
from experiments.harness import Result
from experiments.pathx.report import best_guess
from experiments.pathx.stages import DENSE, SPARSE
from experiments.reports import tokens_text
from experiments.table4.forest import differences
from experiments.table4.questions import by_pair
from experiments.time_to_loss.report import by_contender, seconds_to, target

Results = Mapping[str, Result]  # by file name

LENGTH, HEAD_DIM = 16_384, 64  # of the attention benchmark


class Line(NamedTuple):
    """One row of the table: a question and the function that answers it."""

    question: str
    answer: Callable[[Results], tuple[str, str]]
    """Return two cells: Papilio's result, and that of the paper or the best peer."""
    command: str
    """Module of experiments that measured the numbers."""
    section: str
    """Section of docs/reproduce.md with the full command."""
    page: str
    """Page of docs, with its section, that has the details."""


def headline(**results: Result) -> str:
    """Format the three claims of README.md's first screen as a list."""
    steps = {
        row["name"]: row
        for row in results["train_speed"]["rows"]
        if (row["size"], row["context_length"]) == ("small", 1024)
    }
    ours, peer = steps["ours, no biases"], steps["nanoGPT, cuDNN"]
    speedup = ours["tokens_per_s"] / peer["tokens_per_s"]
    memory = ours["peak_gib"] / peer["peak_gib"]
    attention, best = _dense(results)
    card = _card(results["attention_hopper"])
    one, two = (row["context_length"] / 1e6 for row in results["scale_longest"]["rows"])
    return "\n".join(
        (
            f"- **Fast.** GPT-2 small trains {speedup:.2f}x as fast as nanoGPT on cuDNN attention, "
            f"in {memory:.0%} of the memory (both without biases, 1,024 tokens, one H100).",
            "- **Repeatable at full speed, dense and block-sparse.** Attention gives the same bits "
            f"in every run, at {attention} forward / backward; {best} without that (one {card}, "
            f"causal, {LENGTH:,} tokens, head_dim {HEAD_DIM}).",
            f"- **Long.** A training step of GPT-2 small on a context of {one:.1f}M tokens fits "
            f"one H200, and of {two:.1f}M tokens two. A killed run resumes where it was.\n",
        )
    )


def results_table(**results: Result) -> str:
    """Build the table of all `LINES` from the results that `RESULTS` names."""
    return dict_table(
        {
            "question": f"[{line.question}](docs/{line.page})",
            "Papilio": ours,
            "best other result": theirs,
            "command": f"[`{line.command}`](docs/reproduce.md#{line.section})",
        }
        for line in LINES
        for ours, theirs in [line.answer(results)]
    )


def _from_scratch(results: Results) -> tuple[str, str]:
    theirs = {row["model"]: row["perplexity"] for row in results["table4_hours"]["paper"]}
    short, long = (theirs[f"FlashAttention, {context}"] for context in ("1K", "4K"))
    nats = math.log(long / short)
    verdict = "better" if nats < 0 else "worse"
    most, fewer = (_nats(results, "4k", "1k", [budget]) for budget in LARGE)
    as_paper = _verdict(by_pair(results[LARGE[0]])["4k", "1k"]["chunk"])
    return (
        f"{most}, as the paper evaluates {as_paper}; {fewer}",
        f"paper: {verdict} by {abs(nats):.3f} nats (perplexity {long}, not {short})",
    )


def _growing(results: Results) -> tuple[str, str]:
    return _nats(results, "1k_to_4k", "1k", LARGE), "not reported"


def _one_run(results: Results) -> tuple[str, str]:
    return _nats(results, "1k_to_4k_longer", "1k_then_4k"), "not reported"


def _recipe(results: Results) -> tuple[str, str]:
    return _nats(results, "recipe_same_time", "4k", of=["recipe"]), "not reported"


def _nats(
    results: Results,
    model: str,
    other: str,
    of: Sequence[str] = ("table4_hours", "table4_minutes"),
) -> str:
    """Format how much better or worse `model` is than `other`, for each of the results `of`."""
    answers = []
    for budget in (results[name] for name in of):
        (rows,) = budget["rows"].values()
        tokens = next(row["tokens"] for row in rows if row["label"] == model)
        verdict = _verdict(differences(budget)[model, other])
        answers.append(f"{tokens_text(tokens)} tokens: {verdict}")
    return "; ".join(answers)


def _verdict(difference: Row) -> str:
    low, high = difference["interval"]
    if low <= 0 <= high:
        return f"no difference shown ({-low:.3f} better to {high:.3f} worse)"
    near, far = sorted(map(abs, (low, high)))
    verdict = "better" if high < 0 else "worse"
    return f"{verdict} by {abs(difference['nats']):.3f} nats ({near:.3f} to {far:.3f})"


def _pathx(results: Results) -> tuple[str, str]:
    ours, guess = _accuracies(results, "pathx_dense", 128)
    return ours, f"{BEST_PATHX}; {_paper_accuracy(results, DENSE, 'pathx')}; {guess}"


def _path256(results: Results) -> tuple[str, str]:
    ours, guess = _accuracies(results, "path256_butterfly", 256)
    return ours, f"{_paper_accuracy(results, SPARSE, 'path256')}; {guess}"


def _accuracies(results: Results, stage: str, size: int) -> tuple[str, str]:
    """Format the accuracies of a stage's runs, and of the best guess from the endpoints alone."""
    runs = [run for run in results["pathx"]["runs"] if run["stage"] == stage]
    ours = " and ".join(f"{run['test_accuracy']:.1f}%" for run in runs)
    seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
    guess = best_guess(results["pathfinder_baselines"], size)
    return f"{ours} ({seeds}, own images)", f"decision trees on endpoints: {guess:.1f}%"


def _paper_accuracy(results: Results, model: str, column: str) -> str:
    (row,) = (row for row in results["pathx"]["paper"] if row["model"] == model)
    return f"paper: {row[column]:.1f}%"


def _lra_speed(results: Results) -> tuple[str, str]:
    means = results["lra_speed"]["geometric_means"]
    graphs, plain = (means[mode]["speedup"] for mode in ("captured", "plain"))
    dense, sparse = (row["speedup"] for row in results["lra"]["references"] if row["speedup"])
    return (
        f"dense {graphs['dense']:.1f}x, butterfly {graphs['butterfly']:.1f}x, both sides as CUDA "
        f"graphs; {plain['dense']:.1f}x and {plain['butterfly']:.1f}x without graphs",
        f"paper: dense {dense:.1f}x, block-sparse {sparse:.1f}x",
    )


def _dense(results: Results) -> tuple[str, str]:
    def speeds(row: Row) -> str:
        return f"{row['forward_tflops']:.0f} / {row['backward_tflops']:.0f} TFLOP/s"

    wanted = {"seq_len": LENGTH, "head_dim": HEAD_DIM, "causal": True, "mask": "dense"}
    rows = {
        row["name"]: row
        for row in fastest(results["attention_hopper"]["rows"])
        if row["status"] == "ok" and wanted.items() <= row.items()
    }
    peers = [row for name, row in rows.items() if not name.startswith("ours")]
    ours, best = rows["ours"], min(peers, key=lambda row: row["both_ms"])
    return speeds(ours), f"{best['name']}: {speeds(best)}"


def _repeatable(results: Results) -> tuple[str, str]:
    key = "backward_over_best_repeatable"
    ratios: dict[bool, list[float]] = {}  # by whether the mask is dense
    for row in results["attention_hopper"]["rows"]:
        if key in row:
            ratios.setdefault(row["mask"] == "dense", []).append(row[key])
    dense, sparse = (f"{min(ratios[x]):.2f} to {max(ratios[x]):.2f}" for x in (True, False))
    return (
        f"{dense} times as fast; butterflies {sparse}",
        "flash-attn-4, deterministic; FlexAttention",
    )


def attention_limit(result: Result) -> str:
    """Format the limit of README.md that counts the passes in which a peer is faster."""
    shapes: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in fastest(result["rows"]):
        if row["status"] == "ok":
            shape = tuple(row[key] for key in ("seq_len", "head_dim", "causal"))
            shapes.setdefault(shape, {})[row["name"]] = row
    counts, gains = [], []
    for direction in ("forward", "backward"):
        key = f"{direction}_ms"
        ratios = [
            rows["ours"][key]
            / min(row[key] for name, row in rows.items() if not name.startswith("ours"))
            for rows in shapes.values()
        ]
        slower = [ratio for ratio in ratios if ratio > 1]
        counts.append(f"{len(slower)} of {len(ratios)} {direction}")
        gains.append(f"{max(slower, default=1) - 1:.0%}")
    return (
        f"- A peer is faster in {' and '.join(counts)} passes on an {_card(result)}, by up to "
        f"{' and '.join(gains)}.\n"
    )


def _card(result: Result) -> str:
    """Short name of the GPU of a result, as "H100" of "NVIDIA H100 80GB HBM3"."""
    return result["environment"]["device"].removeprefix("NVIDIA ").split()[0]


def _time_to_loss(results: Results) -> tuple[str, str]:
    peer = target(results["time_to_loss"])
    ours = seconds_to(peer["val_loss"], by_contender(results["time_to_loss"])["recipe"])
    return ours.text(), f"nanoGPT on cuDNN: {peer['seconds']:.0f} s ({NOT_RUN})"


BEST_PATHX = (
    "state-space models: 96% "
    "([S4](https://github.com/state-spaces/s4)); "
    "Transformers with self-pretraining: about 93% ([2310.02980](https://arxiv.org/abs/2310.02980))"
)
"""Accuracy as its authors report it, on the original images."""

NOT_RUN = "modded-nanogpt, the speed record, was not run"

LARGE = "table4_billion", "table4_hours"
"""Budgets of Table 4 with the most tokens, for questions that both answer."""

TABLE4 = "experiments.table4", "table-4", "evaluation.md#what-our-runs-say"
SMALLER = (*TABLE4[:2], "evaluation.md#smaller-budgets")
RECIPE = ("experiments.recipe", "pass-keys-and-a-modern-recipe", "evaluation.md#a-modern-recipe")
PATHX = "experiments.pathx", "path-x-and-path-256", "lra.md#path-x-and-path-256"
LRA = "experiments.lra.speed", "long-range-arena", "lra.md#table-3"
ATTENTION = "experiments.attention", "attention"
TO_LOSS = "experiments.time_to_loss", "training-steps", RECIPE[2]

LINES = (
    Line("Grow the context from 1K to 4K instead of 1K, same tokens", _growing, *TABLE4),
    Line("...in one run instead of two, same tokens", _one_run, *SMALLER),
    Line("Train at 4K from scratch instead of 1K, same tokens", _from_scratch, *TABLE4),
    Line(
        "Modern recipe (NorMuon, growing context) instead of GPT-2's at 4K, same time",
        _recipe,
        *RECIPE,
    ),
    Line("...and its time to nanoGPT's 10-minute loss at 4K", _time_to_loss, *TO_LOSS),
    Line("Path-X (16,384 pixels): accuracy, dense attention", _pathx, *PATHX),
    Line("Path-256 (65,536 pixels): accuracy, butterfly mask", _path256, *PATHX),
    Line("Long Range Arena: training speedup over standard attention", _lra_speed, *LRA),
    Line("Attention, backward, if bits must repeat", _repeatable, *ATTENTION, "hopper.md"),
)

RESULTS = (
    "table4_billion", "table4_hours", "table4_minutes", "recipe", "pathx",
    "pathfinder_baselines", "lra", "lra_speed", "attention_hopper", "train_speed", "time_to_loss",
)  # fmt: skip

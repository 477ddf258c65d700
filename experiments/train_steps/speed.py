"""Speed, memory and time breakdown of a whole training step of GPT-2, by context length.

python -m experiments.train_steps.speed [--nanogpt FOLDER] [--hugging-face]
python -m experiments.train_steps.speed --butterfly --out docs/results/train_speed_butterfly.json

A step is forward, backward, clipping and fused AdamW on 32,768 tokens in bfloat16. All contenders
run in this process on the same tokens. Papilio takes the step of train.py. --nanogpt adds
karpathy/nanoGPT's model from a checkout, and Papilio without biases, like nanoGPT. --hugging-face
adds transformers at a context of 1,024, as in Table 2 of the FlashAttention paper. --butterfly
measures Papilio only, dense and with a butterfly mask. The command fails if a contender's first
loss differs from the others. An interrupted run leaves its measurements in NAME.unfinished.json;
--resume continues it.
"""

from argparse import Namespace
from pathlib import Path

from experiments.harness import Command, Result, measure_rows


def check(args: Namespace) -> None:
    """Reject peers and sizes together with --butterfly."""
    if args.butterfly and (args.nanogpt or args.hugging_face or args.attentions or args.sizes):
        raise ValueError(
            "--butterfly measures Papilio's GPT-2 small only: leave out --nanogpt, --hugging-face, "
            "--attentions and --sizes"
        )


command = Command(__name__, on_gpu=True)
add = command.add
add("--sizes", nargs="+", choices=["small", "medium"], help="default: both; with --butterfly small")
add("--contexts", type=int, nargs="+", default=[1024, 4096, 16384], help="medium: at most 4096")
add("--nanogpt", type=Path, help="folder of a nanoGPT checkout to compare with")
add("--hugging-face", action="store_true", help="compare with transformers' GPT-2")
add("--attentions", action="store_true", help="also Papilio on portable kernels and on PyTorch's")
add("--butterfly", action="store_true", help="Papilio only, dense and with a butterfly mask")
add("--steps", type=int, default=20, help="steps per timing, of five")
command.read(out="docs/results/train_speed.json", resume=True, check=check)

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evaluation.results import Row
from experiments.timing import reset_compiler_and_memory, spread, wall_seconds
from experiments.train_steps.contenders import (
    BUTTERFLY,
    TOKENS_A_STEP,
    Step,
    check_first_loss,
    contenders,
    with_butterfly,
)
from experiments.train_steps.tables import draw_speed, parts_table, speed_table
from model.config import GPT2_SIZES, ModelConfig
from model.flops import mfu, train_flops_per_token
from training.profiling import time_by_part

LONGEST = {"small": 2**30, "medium": 4096}  # contexts


def measure(make: Callable[[], Step], steps: int) -> dict[str, Any]:
    """Measure a contender: first loss (nats), median step time and its parts, peak memory (GiB).

    Memory is measured from the second step on, before a step is captured in a CUDA graph: a replay
    appears to allocate nothing.
    """
    reset_compiler_and_memory()
    # Cached graphs do not record the SDPA backend that they were traced for.
    torch.compiler.config.force_disable_caches = True
    torch.manual_seed(0)
    step = make()
    first_loss = step().item()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(6):
        step()
    times = spread("step_s", [wall_seconds(step, steps) for _ in range(5)])
    peak_gib = torch.cuda.max_memory_allocated() / 2**30
    parts = time_by_part(step, 1000 * times["step_s"])
    parts = {name: part._asdict() for name, part in parts.items()}
    return {"first_loss": first_loss, **times, "peak_gib": peak_gib, "parts": parts}


def batch_of(context_length: int) -> tuple[Tensor, Tensor]:
    """Random tokens and targets of a step, (B, T) int64 each."""
    batch = TOKENS_A_STEP // context_length
    generator = torch.Generator(device="cuda").manual_seed(0)
    text = torch.randint(50257, (batch, context_length + 1), generator=generator, device="cuda")
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def benchmark(size: str, context_length: int, args: Namespace) -> Iterator[list[Row]]:
    """Yield a row for each contender that the options select."""
    tokens, targets = batch_of(context_length)
    config = ModelConfig(context_length=context_length, **GPT2_SIZES[size])
    for name, make in contenders(config, tokens, targets, args).items():
        model = with_butterfly(config) if name == BUTTERFLY else config
        measured = measure(make, args.steps)
        tokens_per_s = TOKENS_A_STEP / measured["step_s"]
        utilisation = mfu(tokens_per_s, model, torch.cuda.get_device_name())
        flops = train_flops_per_token(model, causal=True)
        row = {"size": size, "context_length": context_length, "name": name}
        row |= {"tokens_per_s": tokens_per_s, "tflops_causal": tokens_per_s * flops / 1e12}
        yield [{**row, "mfu": asdict(utilisation) if utilisation else None, **measured}]


def check_loss(rows: list[Row]) -> None:
    """Check the first loss of the last row against the first of its size, and print its speed."""
    last = check_first_loss(rows, "size", lambda row: f"{row['name']} at {row['context_length']}")
    speed = f"{last['tokens_per_s']:10,.0f} tokens/s"
    print(f"{last['size']:6} {last['context_length']:6} {last['name']:32} {speed}", flush=True)


def tables(result: Result) -> str:
    """Tables of speeds and of time by part."""
    return f"{speed_table(result)}\n{parts_table(result)}"


@command.main
def main(args: Namespace) -> None:
    """Measure each size and context in its own stage."""
    torch.set_float32_matmul_precision("high")
    sizes = args.sizes or (["small"] if args.butterfly else ["small", "medium"])
    shapes = [(size, n) for size in sizes for n in args.contexts if n <= LONGEST[size]]
    stages = [partial(benchmark, *shape, args) for shape in shapes]
    measure_rows(args, stages, tables, check_loss, draw=draw_speed, tokens_a_step=TOKENS_A_STEP)

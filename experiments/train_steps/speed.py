"""Speed and memory of a whole training step of GPT-2, by context length, and where its time goes.

python -m experiments.train_steps.speed [--nanogpt FOLDER] [--hugging-face]
python -m experiments.train_steps.speed --butterfly --out docs/results/train_speed_butterfly.json

Forward, backward, clipping and fused AdamW on 32,768 tokens in bfloat16. All contenders run in this
process on the same tokens: ours as train.py takes a step; with --nanogpt, karpathy/nanoGPT's model
from a checkout of it, and ours without biases, as that one is; with --hugging-face, transformers'
at a context of 1,024, where the FlashAttention paper has it in its Table 2; with --butterfly, ours
alone, dense and under a butterfly. Nothing is printed for a contender whose loss differs from the
others'. A run that is stopped leaves what it measured in NAME.unfinished.json; --resume goes on.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import command_parser, errors_as_sentences, read_first


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("--sizes", nargs="+", choices=["small", "medium"], help="both; under a butterfly small")
    add("--contexts", type=int, nargs="+", default=[1024, 4096, 16384], help="medium: to 4096")
    add("--nanogpt", type=Path, help="folder of a nanoGPT checkout, to compare")
    add("--hugging-face", action="store_true", help="transformers' GPT-2, to compare")
    add("--attentions", action="store_true", help="also ours on portable kernels and on PyTorch's")
    add("--butterfly", action="store_true", help="ours alone, dense and under a butterfly")
    add("--steps", type=int, default=20, help="steps of one of five timings")
    add("--resume", action="store_true", help="go on with a run that was stopped")
    add("--out", type=Path, default=Path("docs/results/train_speed.json"))
    args = parser.parse_args(argv)
    if args.butterfly and (args.nanogpt or args.hugging_face or args.attentions or args.sizes):
        parser.error(
            "--butterfly measures our GPT-2 small alone: leave out --nanogpt, --hugging-face, "
            "--attentions and --sizes"
        )
    args.sizes = args.sizes or (["small"] if args.butterfly else ["small", "medium"])
    return args


import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evaluation.results import Row
from evaluation.style import save
from experiments.results import collect_rows
from experiments.train_steps.contenders import TOKENS_A_STEP, Step, contenders, our_step
from experiments.train_steps.tables import draw_speed, parts_table, speed_table
from model.config import GPT2_SIZES, MaskConfig, ModelConfig
from model.flops import mfu, train_flops_per_token
from training.profiling import time_by_part

LOSS_TOLERANCE = 0.05  # nats; the contenders draw different weights from one distribution
LONGEST = {"small": 2**30, "medium": 4096}  # contexts
HUGGING_FACE_CONTEXT = 1024


def measure(make: Callable[[], Step], steps: int) -> dict[str, Any]:
    """First loss (nats), median seconds of a step and its parts, peak memory (GiB) of a contender.

    Memory counts from the second step on, before a step is captured in a CUDA graph: replayed, it
    seems to take none.
    """
    torch._dynamo.reset()
    # Cached graphs do not know which backend of SDPA they were traced for.
    torch.compiler.config.force_disable_caches = True
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    step = make()
    first_loss = step().item()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(6):
        step()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / steps)
    step_s = statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated()
    parts = time_by_part(step, 1000 * step_s)
    return {
        "first_loss": first_loss,
        "step_s": step_s,
        "step_s_fastest": min(seconds),
        "step_s_slowest": max(seconds),
        "peak_gib": peak / 2**30,
        "parts": {name: part._asdict() for name, part in parts.items()},
    }


def batch_of(context_length: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and the targets of a step: (B, T) int64 each."""
    batch = TOKENS_A_STEP // context_length
    generator = torch.Generator(device="cuda").manual_seed(0)
    text = torch.randint(50257, (batch, context_length + 1), generator=generator, device="cuda")
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def butterflies(size: str, context_length: int, steps: int) -> Iterator[list[Row]]:
    """A row for dense attention, and one for a butterfly."""
    tokens, targets = batch_of(context_length)
    dense = ModelConfig(context_length=context_length, **GPT2_SIZES[size])
    sparse = replace(dense, mask=MaskConfig(pattern="butterfly"))
    for name, config in (("ours", dense), ("ours, butterfly", sparse)):
        make = partial(our_step, config, tokens, targets, deterministic=True)
        yield [row_of(size, name, config, make, steps)]


def benchmark(
    size: str,
    context_length: int,
    nanogpt: Path | None,
    hugging_face: bool,
    attentions: bool,
    steps: int,
) -> Iterator[list[Row]]:
    """One row for each contender."""
    tokens, targets = batch_of(context_length)
    config = ModelConfig(context_length=context_length, **GPT2_SIZES[size])
    found = contenders(
        config,
        tokens,
        targets,
        attentions=attentions,
        nanogpt=nanogpt,
        hugging_face=hugging_face and context_length == HUGGING_FACE_CONTEXT,
    )
    for name, make in found.items():
        yield [row_of(size, name, config, make, steps)]


def row_of(size: str, name: str, config: ModelConfig, make: Callable[[], Step], steps: int) -> Row:
    """Measure a contender, a model of this configuration."""
    measured = measure(make, steps)
    tokens_per_s = TOKENS_A_STEP / measured["step_s"]
    utilisation = mfu(tokens_per_s, config, torch.cuda.get_device_name())
    flops = train_flops_per_token(config, causal=True)
    return {
        "size": size,
        "context_length": config.context_length,
        "name": name,
        "tokens_per_s": tokens_per_s,
        "tflops_causal": tokens_per_s * flops / 1e12,
        "mfu": asdict(utilisation) if utilisation else None,
        **measured,
    }


def check_loss(rows: list[Row]) -> None:
    """Print the speed of the last row, if its first loss is that of the first of its size."""
    last = rows[-1]
    first = next(row for row in rows if row["size"] == last["size"])
    if not abs(last["first_loss"] - first["first_loss"]) <= LOSS_TOLERANCE:  # also where it is NaN
        raise SystemExit(
            f"{last['name']} at {last['context_length']}: the first loss is "
            f"{last['first_loss']:.4f}, and that of {first['name']} at {first['context_length']} "
            f"{first['first_loss']:.4f}: no speed is reported"
        )
    speed = f"{last['tokens_per_s']:10,.0f} tokens/s"
    print(f"{last['size']:6} {last['context_length']:6} {last['name']:32} {speed}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    if not torch.cuda.is_available():
        raise SystemExit("steps are measured on a GPU, and PyTorch sees none")
    torch.set_float32_matmul_precision("high")
    shapes = [(size, n) for size in args.sizes for n in args.contexts if n <= LONGEST[size]]
    if args.butterfly:
        stages = [partial(butterflies, *shape, args.steps) for shape in shapes]
    else:
        peers = args.nanogpt, args.hugging_face, args.attentions
        stages = [partial(benchmark, *shape, *peers, args.steps) for shape in shapes]
    rows = collect_rows(
        args.out, stages, check_loss, resume=args.resume, tokens_a_step=TOKENS_A_STEP
    )
    save(draw_speed({"rows": rows}), args.out.with_suffix(".png"))
    print(speed_table({"rows": rows}))
    print(parts_table({"rows": rows}))
    print(f"wrote {args.out} and its picture")


if __name__ == "__main__":
    with errors_as_sentences():
        main()

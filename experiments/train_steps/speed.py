"""Speed and memory of a whole training step of GPT-2 small, by context length and attention.

python -m experiments.train_steps.speed [--contexts 1024 4096 16384] [--nanogpt FOLDER]
python -m experiments.train_steps.speed --butterfly --out docs/results/train_speed_butterfly.json

Forward, backward, clipping and fused AdamW on 32,768 tokens in bfloat16, under torch.compile. All
contenders run in this process on the same tokens; with --nanogpt, karpathy/nanoGPT's model too,
from a checkout of it; with --butterfly, ours alone, dense and under a butterfly. Nothing is printed
for a contender whose loss differs from the others'. A run that is stopped leaves what it measured
in NAME.unfinished.json; --resume goes on.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from configs.command_line import command_parser, errors_as_sentences, read_first


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    add("--nanogpt", type=Path, help="folder of a nanoGPT checkout, to compare")
    add("--butterfly", action="store_true", help="ours alone, dense and under a butterfly")
    add("--steps", type=int, default=20, help="steps of one of five timings")
    add("--resume", action="store_true", help="go on with a run that was stopped")
    add("--out", type=Path, default=Path("docs/results/train_speed.json"))
    args = parser.parse_args(argv)
    if args.butterfly and args.nanogpt:
        parser.error("--butterfly measures ours alone: leave out --nanogpt")
    return args


import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from evaluation.results import Row, collect_rows
from evaluation.style import save
from experiments.train_steps.tables import draw_speed, speed_table
from model.config import GPT2_SIZES, MaskConfig, ModelConfig
from model.flops import mfu, train_flops_per_token
from model.gpt import GPT
from training.distributed import Processes
from training.finite_steps import FiniteSteps
from training.graphs import GraphedStep
from training.language.config import OptimConfig
from training.language.step import LanguageStep
from training.numerics import autocast, deterministic_algorithms
from training.optim import make_optimizer

TOKENS_A_STEP = 32_768
LOSS_TOLERANCE = 0.05  # nats; the contenders draw different weights from one distribution

NANOGPT_BACKENDS = {
    "nanoGPT, flash": SDPBackend.FLASH_ATTENTION,
    "nanoGPT, cuDNN": SDPBackend.CUDNN_ATTENTION,
}

Step = Callable[[], Tensor]
"""A step of training; gives its loss in a tensor that the next one may overwrite."""


def our_step(config: ModelConfig, tokens: Tensor, targets: Tensor, *, deterministic: bool) -> Step:
    """A step as train.py takes it on one GPU."""
    model = GPT(config).cuda()
    optim = OptimConfig(max_steps=1, batch_tokens=TOKENS_A_STEP, micro_batch_size=1)
    optimizer = make_optimizer(model, optim, capturable=True)
    alone = Processes(rank=0, world_size=1, device=tokens.device)
    finite = FiniteSteps(optimizer, alone, ["loss"])
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=False)
    learn = LanguageStep(
        compiled,
        finite,
        partial(autocast, "bfloat16", alone.device),
        grad_clip=optim.grad_clip,
    )
    take = GraphedStep(learn, optimizer, alone.device)

    def step() -> Tensor:
        finite.kept["sums"].zero_()
        with deterministic_algorithms(deterministic):
            take(tokens[None], targets[None])  # one micro-batch
        return finite.kept["sums"]

    return step


def nanogpt_step(
    folder: Path, context_length: int, tokens: Tensor, targets: Tensor, backend: SDPBackend
) -> Step:
    """A training step of nanoGPT's model, set up as in its train.py, on a backend of SDPA."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    if spec is None or spec.loader is None or not (folder / "model.py").exists():
        raise FileNotFoundError(f"--nanogpt={folder} holds no model.py: give a checkout of nanoGPT")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    model = module.GPT(
        module.GPTConfig(block_size=context_length, vocab_size=50304, dropout=0.0, bias=False)
    ).cuda()
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")
    return training_step(
        torch.compile(model),
        optimizer,
        lambda run: run(tokens, targets)[1],
        partial(sdpa_kernel, backend),
    )


def training_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], Tensor],
    settings: Callable[[], AbstractContextManager[Any]],
) -> Step:
    """Forward, backward, clipping and optimizer of a compiled model, all within `settings`."""

    def step() -> Tensor:
        with settings():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_of(model)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

    return step


def measure(make: Callable[[], Step], steps: int) -> dict[str, float]:
    """First loss (nats), median seconds of a step, and peak memory (GiB) of a contender."""
    torch._dynamo.reset()
    # Cached graphs do not know which backend of SDPA they were traced for.
    torch.compiler.config.force_disable_caches = True
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    step = make()
    first_loss = step().item()
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / steps)
    return {
        "first_loss": first_loss,
        "step_s": statistics.median(seconds),
        "step_s_fastest": min(seconds),
        "step_s_slowest": max(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def batch_of(context_length: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and the targets of a step: (B, T) int64 each."""
    batch = TOKENS_A_STEP // context_length
    generator = torch.Generator(device="cuda").manual_seed(0)
    text = torch.randint(50257, (batch, context_length + 1), generator=generator, device="cuda")
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def butterflies(context_length: int, steps: int) -> Iterator[list[Row]]:
    """A row for dense attention, and one for a butterfly."""
    tokens, targets = batch_of(context_length)
    dense = ModelConfig(context_length=context_length, **GPT2_SIZES["small"])
    sparse = replace(dense, mask=MaskConfig(pattern="butterfly"))
    for name, config in (("ours", dense), ("ours, butterfly", sparse)):
        make = partial(our_step, config, tokens, targets, deterministic=True)
        yield [row_of(name, config, make, steps)]


def benchmark(context_length: int, nanogpt: Path | None, steps: int) -> Iterator[list[Row]]:
    """One row for each contender."""
    tokens, targets = batch_of(context_length)
    ours = partial(our_step, tokens=tokens, targets=targets)
    config = ModelConfig(context_length=context_length, **GPT2_SIZES["small"])
    portable, sdpa = (replace(config, attention=name) for name in ("triton", "sdpa"))
    # Ours are deterministic, which is the default of train.py; PyTorch's attention is not.
    contenders: dict[str, Callable[[], Step]] = {
        "ours": partial(ours, config, deterministic=True),
        "ours, portable": partial(ours, portable, deterministic=True),
        "ours, sdpa": partial(ours, sdpa, deterministic=False),
    }
    if nanogpt is not None:
        theirs = partial(nanogpt_step, nanogpt, context_length, tokens, targets)
        contenders |= {name: partial(theirs, backend) for name, backend in NANOGPT_BACKENDS.items()}
    for name, make in contenders.items():
        yield [row_of(name, config, make, steps)]


def row_of(name: str, config: ModelConfig, make: Callable[[], Step], steps: int) -> Row:
    """Measure a contender, a model of this configuration."""
    measured = measure(make, steps)
    tokens_per_s = TOKENS_A_STEP / measured["step_s"]
    utilisation = mfu(tokens_per_s, config, torch.cuda.get_device_name())
    flops = train_flops_per_token(config, causal=True)
    return {
        "context_length": config.context_length,
        "name": name,
        "tokens_per_s": tokens_per_s,
        "tflops_causal": tokens_per_s * flops / 1e12,
        "mfu": asdict(utilisation) if utilisation else None,
        **measured,
    }


def check_loss(rows: list[Row]) -> None:
    """Print the speed of the last row, if its first loss is that of the first row."""
    first, last = rows[0], rows[-1]
    if not abs(last["first_loss"] - first["first_loss"]) <= LOSS_TOLERANCE:  # also where it is NaN
        raise SystemExit(
            f"{last['name']} at {last['context_length']}: the first loss is "
            f"{last['first_loss']:.4f}, and that of {first['name']} at {first['context_length']} "
            f"{first['first_loss']:.4f}: no speed is reported"
        )
    speed = f"{last['tokens_per_s']:10,.0f} tokens/s"
    print(f"{last['context_length']:6} {last['name']:32} {speed}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    if not torch.cuda.is_available():
        raise SystemExit("steps are measured on a GPU, and PyTorch sees none")
    torch.set_float32_matmul_precision("high")
    if args.butterfly:
        stages = [partial(butterflies, n, args.steps) for n in args.contexts]
    else:
        stages = [partial(benchmark, n, args.nanogpt, args.steps) for n in args.contexts]
    rows = collect_rows(
        args.out, stages, check_loss, resume=args.resume, tokens_a_step=TOKENS_A_STEP
    )
    save(draw_speed({"rows": rows}), args.out.with_suffix(".png"))
    print(speed_table({"rows": rows}))
    print(f"wrote {args.out} and its picture")


if __name__ == "__main__":
    with errors_as_sentences():
        main()

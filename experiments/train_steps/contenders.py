"""Training steps of Papilio, nanoGPT and Hugging Face, each set up as its users run it."""

import math
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from data.text.config import DataConfig
from evaluation.results import Row
from experiments.harness import load_module
from model.config import ModelConfig
from model.gpt import GPT
from model.mask_config import MaskConfig
from training.config import RunConfig
from training.distributed import Processes
from training.finite_steps import FiniteSteps
from training.language.config import OptimConfig, TrainConfig
from training.language.task import language_loss
from training.numerics import autocast, deterministic_algorithms
from training.optim import make_optimizer
from training.parallel import (
    can_capture,
    compile_and_wrap,
    set_up_context_parallel,
    shard_model,
    weights_are_static,
)
from training.step import GraphedStep, train_step

TOKENS_A_STEP = 32_768
LOSS_TOLERANCE = 0.05  # nats; contenders draw different weights from the same distribution
BUTTERFLY = "ours, butterfly"

Step = Callable[[], Tensor]
"""One training step; returns the loss in a tensor that the next step may overwrite."""

_NANOGPT = {
    "nanoGPT, flash": SDPBackend.FLASH_ATTENTION,
    "nanoGPT, cuDNN": SDPBackend.CUDNN_ATTENTION,
}
# name -> (attn_implementation, use torch.compile)
_HUGGING_FACE = {
    "Hugging Face, eager": ("eager", False),
    "Hugging Face, sdpa": ("sdpa", False),
    "Hugging Face, compiled": ("sdpa", True),
}
_HUGGING_FACE_CONTEXT = 1024


def contenders(
    config: ModelConfig, tokens: Tensor, targets: Tensor, options: Namespace
) -> dict[str, Callable[[], Step]]:
    """Steps by name, for the contenders that the options of speed.py select; Papilio is first.

    `config` is the configuration of Papilio's model; the others get the same shape. Each step
    trains on `tokens` and `targets`, (B, T) int64 each.
    """
    # Papilio is deterministic, the default of train.py. PyTorch's attention is not.
    ours = partial(our_step, tokens=tokens, targets=targets, deterministic=True)
    steps: dict[str, Callable[[], Step]] = {"ours": partial(ours, config)}
    if options.butterfly:
        steps[BUTTERFLY] = partial(ours, with_butterfly(config))
    if options.nanogpt is not None:  # its model has no biases
        steps["ours, no biases"] = partial(ours, replace(config, bias=False))
    if options.attentions:
        steps["ours, portable"] = partial(ours, replace(config, attention="triton"))
        sdpa = replace(config, attention="sdpa")
        steps["ours, sdpa"] = partial(ours, sdpa, deterministic=False)
    if options.nanogpt is not None:
        for name, backend in _NANOGPT.items():
            steps[name] = partial(nanogpt_step, options.nanogpt, config, tokens, targets, backend)
    if options.hugging_face and config.context_length == _HUGGING_FACE_CONTEXT:
        for name, setup in _HUGGING_FACE.items():
            steps[name] = partial(hugging_face_step, config, tokens, *setup)
    return steps


def with_butterfly(config: ModelConfig) -> ModelConfig:
    """The same model with a butterfly mask."""
    return replace(config, mask=MaskConfig(pattern="butterfly"))


def check_first_loss(rows: list[Row], key: str, name: Callable[[Row], str]) -> Row:
    """Check the first loss of the last row against the first row with the same `key`.

    Returns:
        The last row.

    Raises:
        SystemExit: the losses differ.
    """
    row = rows[-1]
    first = next(other for other in rows if other[key] == row[key])
    if not abs(row["first_loss"] - first["first_loss"]) <= LOSS_TOLERANCE:  # also where it is NaN
        raise SystemExit(
            f"{name(row)}: the first loss is {row['first_loss']:.4f}, but that of {name(first)} is "
            f"{first['first_loss']:.4f}: no speed is reported"
        )
    return row


def check_last_loss(loss: float, name: str) -> None:
    """Check the loss of the last timed step: a GPU multiplies NaN faster than other numbers.

    Raises:
        SystemExit: it is not finite, or 0, as of a step of train.py that was skipped.
    """
    if not (math.isfinite(loss) and loss > 0):
        raise SystemExit(
            f"{name}: the loss or a gradient is not finite at the end of the timings, so they are "
            "not reported"
        )


def our_step(config: ModelConfig, tokens: Tensor, targets: Tensor, *, deterministic: bool) -> Step:
    """The step of train.py on one GPU."""
    alone = Processes(rank=0, world_size=1, device=tokens.device)
    optim = OptimConfig(max_steps=1, batch_tokens=TOKENS_A_STEP, micro_batch_size=1)
    run = RunConfig(out_dir="unused", deterministic=deterministic)
    full_config = TrainConfig(model=config, data=DataConfig(path="unused"), optim=optim, run=run)
    return step_of(full_config, alone, tokens[None], targets[None])  # one micro-batch


def step_of(config: TrainConfig, processes: Processes, *batch: Tensor) -> Step:
    """The step of train.py, on whole sequences.

    Processes that share sequences must get the same batch.

    Args:
        batch: tokens, targets and optionally doc_start, (M, B, T) each, M micro-batches.
    """
    with processes.device:
        model = GPT(config.model)
    context = set_up_context_parallel(model, processes)
    batch = tuple(context.shard(x, dim=2) for x in batch)
    shard_model(model, config, processes)
    captured = can_capture(config.run, processes)
    optimizer = make_optimizer(model, config.optim, capturable=captured)
    finite = FiniteSteps(optimizer, processes, ["loss"], grad_clip=config.optim.grad_clip)
    _, parallel = compile_and_wrap(model, config.run, processes, n_shapes=1)
    stay = weights_are_static(model)
    activations = partial(autocast, config.run.dtype, processes.device, cache_casts=stay)
    loss = partial(language_loss, activations)
    learn = partial(train_step, loss, parallel, finite)
    take = GraphedStep(learn, optimizer, processes.device, capture=captured, cache_casts=stay)

    def step() -> Tensor:
        finite.kept["sums"].zero_()
        with deterministic_algorithms(config.run.deterministic):
            take(*batch)
        return finite.kept["sums"]

    return step


def nanogpt_step(
    folder: Path, config: ModelConfig, tokens: Tensor, targets: Tensor, backend: SDPBackend
) -> Step:
    """A step of nanoGPT's model, set up as in its train.py, on one backend of SDPA."""
    file = folder / "model.py"
    if not file.exists():
        raise FileNotFoundError(f"--nanogpt={folder} must be a checkout of nanoGPT with model.py")
    module = load_module("nanogpt_model", file)
    shape = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd")}
    shape |= {"block_size": config.context_length, "vocab_size": 50304}
    model = module.GPT(module.GPTConfig(**shape, dropout=0.0, bias=False)).cuda()
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")
    on_backend = partial(sdpa_kernel, backend)
    loss_of = lambda run: run(tokens, targets)[1]  # noqa: E731
    return training_step(torch.compile(model), optimizer, loss_of, on_backend)


def hugging_face_step(config: ModelConfig, tokens: Tensor, attention: str, compiled: bool) -> Step:
    """A step of transformers' GPT-2 under autocast, in chunks of rows that fit into memory."""
    import transformers

    library: Any = transformers
    shape = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd")}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    setup = {"use_cache": False, "attn_implementation": attention}
    gpt2 = library.GPT2Config(n_positions=config.context_length, **shape, **no_dropout, **setup)
    model = library.GPT2LMHeadModel(gpt2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    run = torch.compile(model) if compiled else model
    rows = len(tokens)

    def micro_step(chunk: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = run(input_ids=chunk, labels=chunk).loss * (len(chunk) / len(tokens))
        loss.backward()
        return loss.detach()

    def step() -> Tensor:
        nonlocal rows
        while True:
            optimizer.zero_grad(set_to_none=True)
            try:
                loss = torch.stack([micro_step(chunk) for chunk in tokens.split(rows)]).sum()
                break
            except torch.OutOfMemoryError:
                if rows == 1:
                    raise
            rows //= 2
            torch.cuda.empty_cache()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def training_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], Tensor],
    settings: Callable[[], AbstractContextManager[Any]],
) -> Step:
    """Forward, backward, clipping and optimizer step of a model, all within `settings`."""

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

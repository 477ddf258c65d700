"""Estimates of what a run needs, without a GPU or data: `train.py CONFIG --dry-run`."""

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

from configs.reader import to_yaml
from kernels.limits import MAX_RECEIVE_BUFFER, MIN_RING_TOKENS, chunk_rows
from model.classifier_config import ClassifierConfig
from model.config import ModelConfig
from model.flops import (
    classifier_train_flops,
    count_params,
    hours_at,
)
from model.hf.config import layout_for, unsupported_reason
from training.classification.config import ClassifyConfig
from training.config import counted
from training.epochs import epoch_lines, example_epoch_lines
from training.language.config import TrainConfig
from training.language.stages import flops_per_token
from training.tasks import RunConfiguration, read_run

FLAG, PRINT_CONFIG = "--dry-run", "--print-config"
CARDS = (16, 24, 40, 80, 141)  # GiB of GPUs that people have
SPARE = 0.92  # of a card's memory: the rest is for CUDA and for gaps between allocations
UTILISATION = 0.42
"""Share of a GPU's peak. The shipped GPTs reach 39% to 52% on an H100 (train_speed.json)."""
MIN_WIDTH = 512
"""Narrower models wait for kernel launches and memory: FLOPs do not predict their time."""
CLOCKS = {"H100": "H100 80GB HBM3", "A100": "A100", "RTX 4090": "RTX 4090"}


def handle_dry_run(argv: Sequence[str]) -> None:
    """Print what a run needs if --dry-run or --dry-run=GPUS is an argument, and exit.

    With --print-config, print the whole configuration instead.

    Raises:
        ConfigError: the configuration is not valid.
        ValueError: GPUS is not a number of GPUs, or the batch cannot be shared by that number.
    """
    asked = [a for a in argv if a == PRINT_CONFIG or a.partition("=")[0] == FLAG]
    if not asked:
        return
    _, _, count = asked[-1].partition("=")
    if count and (not count.isdecimal() or int(count) < 1):
        raise ValueError(
            f"{FLAG}={count} must be a number of GPUs, at least 1: for example {FLAG}=8"
        )
    config = read_run([argument for argument in argv if argument not in asked])
    if PRINT_CONFIG in asked:
        sys.stdout.write(to_yaml(config))
    else:
        sys.stdout.write(dry_run(config, int(count or 1)))
    sys.stdout.flush()
    raise SystemExit(0)


def dry_run(config: RunConfiguration, n_gpus: int) -> str:
    """Parameters, FLOPs, time and memory of a run on `n_gpus` GPUs, as far as they are known."""
    lines = _gpt(config, n_gpus) if isinstance(config, TrainConfig) else _classifier(config, n_gpus)
    return "\n".join(lines) + "\n"


def _gpt(config: TrainConfig, n_gpus: int) -> list[str]:
    model, optim = config.model, config.optim
    n_params = count_params(model)
    positions = model.context_length * model.n_embd if model.positions == "learned" else 0
    untied = 0 if model.tie_embeddings else model.vocab_size * model.n_embd
    causal, full = (flops_per_token(model, config.stages, causal=half) for half in (True, False))
    n_tokens = config.tokens
    return [
        f"{n_params + positions + untied:,} parameters, {positions:,} of them learned positions",
        *config.batch_lines(n_gpus),
        f"{optim.max_steps:,} steps: {n_tokens:,} tokens, {n_tokens / n_params:.1f} per parameter",
        f"{causal:.3g} FLOPs a token, {full:.3g} if all of attention counts; "
        f"{causal * n_tokens:.3g} the whole run",
        *mask_notes(model, causal=True),
        _times(causal * n_tokens, model.n_embd, n_gpus),
        *_memory(config, n_gpus),
        *config.scaling_notes(),
        export_note(model),
        *epoch_lines(config),
    ]


def _classifier(config: ClassifyConfig, n_gpus: int) -> list[str]:
    # counted by building it, without memory for weights: classifiers have many kinds of embeddings
    import torch

    from model.classifier import Classifier

    model, optim = config.model, config.optim
    with torch.device("meta"):
        n_params = sum(p.numel() for p in Classifier(model).parameters())
    example = classifier_train_flops(model)
    whole = optim.max_steps * optim.batch_size * example
    return [
        f"{n_params:,} parameters",
        f"per step: {optim.batch_size:,} examples of {model.context_length:,} tokens "
        f"on {counted(n_gpus, 'GPU')}",
        f"{optim.max_steps:,} steps: {optim.max_steps * optim.batch_size:,} examples",
        f"{example:.3g} FLOPs an example at full length; {whole:.3g} the whole run",
        *mask_notes(model, causal=False),
        _times(whole, model.n_embd, n_gpus),
        "memory is estimated for GPTs only",
        *example_epoch_lines(config),
    ]


def _times(flops: float, width: int, n_gpus: int) -> str:
    """How long GPUs take for these FLOPs, in a sentence."""
    if width < MIN_WIDTH:
        return (
            f"no estimate of the time: FLOPs do not predict it below model.n_embd={MIN_WIDTH}. "
            "A run prints the time that is left"
        )
    times = [
        f"{duration(hours_at(flops, name, UTILISATION) / n_gpus)} on {n_gpus} x {card}"
        for card, name in CLOCKS.items()
    ]
    return f"about {', '.join(times)}, at {UTILISATION:.0%} of their peak"


def duration(hours: float) -> str:
    """A time in the unit that suits it: minutes, hours or days."""
    for unit, length in (("days", 24), ("hours", 1)):
        if hours >= 2 * length:
            return f"{hours / length:,.3g} {unit}"
    return f"{max(1, round(60 * hours))} min"


def startup_notes(config: RunConfiguration) -> list[str]:
    """Lines that a run prints before its first step: mask, export, too many epochs, compilation."""
    notes = mask_notes(config.model, causal=isinstance(config, TrainConfig))
    if isinstance(config, TrainConfig):
        notes += [*config.scaling_notes(), export_note(config.model)]
        notes += [line for line in epoch_lines(config) if line.startswith("warning")]
    if config.run.compile:
        notes.append("compiling: the first step takes up to a minute, on a CPU several")
    return notes


def export_note(model: ModelConfig) -> str:
    """A line on the class of transformers that scripts.export_hf writes, or why it cannot."""
    reason = unsupported_reason(model)
    if reason is not None:
        return f"export to transformers: none. {reason}"
    return f"export to transformers: {layout_for(model).architecture}"


def mask_notes(model: ModelConfig | ClassifierConfig, *, causal: bool) -> list[str]:
    """A line on the share of attention that a mask leaves, or a warning if it hides nothing."""
    mask = model.mask
    if mask.pattern == "dense":
        return []
    density = mask.density(model.context_length, causal=causal)
    if density < 1:
        return [f"model.mask.pattern={mask.pattern} computes {density:.1%} of dense attention"]
    return [
        f"warning: model.mask.pattern={mask.pattern} hides nothing in {model.context_length:,} "
        f"tokens and blocks of {mask.block_size}: attention is dense. Set a smaller "
        "model.mask.block_size, or a longer context"
    ]


def _memory(config: TrainConfig, n_gpus: int) -> list[str]:
    needed = estimate(config, config.optim.micro_batch_size, n_gpus)
    parts = f"{needed.state / GIB:.1f} weights and optimizer"
    forward = f"{needed.activations / GIB:.1f} activations, {needed.head / GIB:.1f} loss"
    # without accumulation, gradients take the place of activations
    gradients = f", {needed.gradients / GIB:.1f} gradients" if needed.accumulates else ""
    parts += f"{gradients}, {forward}"
    if needed.receive_buffers:
        parts += f", {needed.receive_buffers / GIB:.1f} to exchange keys"
    fits = []
    for card in CARDS:
        most = fitting_micro_batch(config, card * GIB * SPARE, n_gpus)
        fits.append(f"{card} GiB: {most}" if most else f"{card} GiB: none")
    return [
        f"about {needed.total / GIB:.1f} GiB a GPU (with run.compile): {parts}",
        f"largest optim.micro_batch_size on a card of {', '.join(fits)}",
    ]


GIB = 2**30
OVERHEAD = 0.3 * GIB  # what cuBLAS keeps to work in, tokens, masks


class Memory(NamedTuple):
    """Bytes of one GPU."""

    state: float
    """Weights, both moments of AdamW, casts of the weights or what is gathered of them; and what
    libraries keep."""
    gradients: float
    """Gradients, after a backward pass."""
    activations: float
    """Tensors that blocks keep for the backward pass, and those that one of them computes again."""
    head: float
    """Logits of one chunk of tokens, and their gradient's sum."""
    receive_buffers: float
    """Buffers for keys and their gradients from other GPUs of the machine."""
    accumulates: bool
    """Whether gradients are there while another micro-batch goes forward."""

    @property
    def total(self) -> float:
        """The most that is there at a time: activations go as gradients come."""
        forward = self.activations + self.head
        stays = self.state + self.receive_buffers
        if self.accumulates:
            return stays + self.gradients + forward
        return stays + max(self.gradients, forward)


def estimate(config: TrainConfig, micro_batch_size: int, world_size: int) -> Memory:
    """Estimate the memory of a step on one of `world_size` GPUs, with run.compile and our kernels.

    Adjusted to what was measured, and within a tenth of it, on one H100 (train_speed_butterfly.json
    and train_speed.json of docs/results) and two H200s (scale*.json). `run.activation_memory` below
    1 is not counted.
    """
    model = config.model
    C = model.n_embd
    size = 2 if config.run.dtype == "bfloat16" else 4  # bytes of an activation
    wide = 4 if model.residual_in_fp32 else size
    n_tokens = micro_batch_size * model.context_length // config.parallel.context
    state, gradients = _weights(config, world_size)

    norms = 2 * (wide + size) * C  # the stream and its normalisation, twice a block
    if world_size > 1:
        norms += size * C  # compiled by block: the stream, and what is to be added to it
    A, kv = model.attention_width, model.kv_heads * model.head_dim
    attention = size * (A + 2 * kv + A) + 4 * model.n_head  # q, k, v and out, and lse
    of_product = model.positions == "learned" and not model.qk_norm  # q and k are views of it
    context = config.parallel.context
    by_ring = (
        model.context_length // context >= MIN_RING_TOKENS
        and model.window_size is None
        and model.attention_dropout == 0
    )
    receive_buffers = 0.0
    if context > 1 and by_ring:
        # keys and values in a tensor of their own: kernels/context/ring.py
        attention += size * 2 * kv if of_product else 0
        receive_buffers = _receive_buffers(n_tokens * size * 2 * kv, context, size)
    else:
        attention += 0 if of_product else size * (A + kv)
        if context > 1:
            # those up to the end of both chunks for its own: kernels/context/gather.py
            attention += size * 2 * kv * (context + 0.5 - 1)
    if model.mlp == "swiglu":
        mlp = size * 3 * model.mlp_width  # gate, value and their product
        mlp_backward = 2 * mlp  # and the gradients of these
    else:
        mlp = size * model.mlp_width * (1 if model.recompute_gelu else 2)
        mlp_backward = 3 * size * model.mlp_width  # before and after the GELU, and a gradient
    dropout = 2 * C if model.dropout > 0 else 0  # a byte for each number that may be dropped
    block = norms + attention + mlp + dropout
    # what the backward pass of a block is at after it was computed again: its MLP, between the
    # stream, its normalisation and the gradients of both
    again = 2 * (wide + size) * C + dropout + mlp_backward
    kept, again = {
        "none": (block, 0),
        # the stream, what is to be added to it, out and lse
        "selective": ((wide + size) * C + size * A + 4 * model.n_head, again),
        "full": ((wide + size) * C, again + attention),
    }[config.run.activation_checkpointing]
    row = model.padded_vocab_size * size
    head = chunk_rows(n_tokens, row) * row + n_tokens * C * size
    if world_size == 1:
        # Over before a block is computed again. On several, as much is there in addition: measured,
        # and not accounted for.
        head = max(0, head - n_tokens * again)
    return Memory(
        state,
        gradients,
        n_tokens * (model.n_layer * kept + again),
        head,
        receive_buffers,
        accumulates=max(s.batch_tokens for s in config.stages) > n_tokens * world_size,
    )


def _receive_buffers(sent: float, context: int, size: int) -> float:
    """Receive buffers for `sent` bytes of keys and values, and for their gradients, two of each.

    See kernels/context/ring.py; GPUs of several machines have none.
    """
    sums = sent if context == 2 else 4 / size * sent
    at_a_time = min(2, context - 1)
    return at_a_time * sum(n for n in (sent, sums) if n <= MAX_RECEIVE_BUFFER)


def _weights(config: TrainConfig, world_size: int) -> tuple[float, float]:
    """Bytes of what is there of weights all the time, and of gradients at the end of a step."""
    n_params, parallel = _n_params(config), config.parallel
    size = 2 if config.run.dtype == "bfloat16" else 4
    if parallel.mode == "ddp" or world_size == 1:
        # float32 three times, a cast, and gradients where processes exchange them
        each = 12 + (size if size == 2 else 0) + (4 if world_size > 1 else 0)
        return OVERHEAD + n_params * each, 4 * n_params
    if parallel.gather_dtype != "auto":
        size = 2 if parallel.gather_dtype == "bfloat16" else 4
    layers = config.model.n_layer
    tables = _table_params(config)
    block = (n_params - tables) / layers
    # the block at hand and the next one, or all of them
    gathered = tables + (2 if parallel.reshard else layers) * block
    # of which the last are about to be added up
    gradients = 4 * n_params / world_size + (tables + block) * (size + 4)
    # Estimated for AdamW. Muon has one moment less, and its step takes 1 GiB, or 16 bytes for each
    # element of a larger matrix, after activations and gathered weights are freed.
    return OVERHEAD + 12 * n_params / world_size + gathered * size, gradients


def largest_micro_batch(config: TrainConfig, memory: float, world_size: int) -> int:
    """The most sequences at a time for which the estimate is within `memory` bytes; 0: none."""
    low, high = 0, 1
    while estimate(config, high, world_size).total <= memory:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if estimate(config, middle, world_size).total <= memory:
            low = middle
        else:
            high = middle
    return low


def fitting_micro_batch(config: TrainConfig, memory: float, n_gpus: int) -> int:
    """Largest optim.micro_batch_size within `memory` bytes that divides the batch; 0: none."""
    most = largest_micro_batch(config, memory, n_gpus)
    n_groups = n_gpus // config.parallel.context  # of GPUs that share a sequence
    tokens = math.gcd(*(stage.batch_tokens for stage in config.stages))
    sequences = tokens // config.model.context_length // n_groups
    return max((n for n in range(1, most + 1) if sequences % n == 0), default=0)


def _n_params(config: TrainConfig) -> int:
    """Parameters as they lie in memory, with padding of the vocabulary."""
    model = config.model
    return count_params(model) - model.vocab_size * model.n_embd + _table_params(config)


def _table_params(config: TrainConfig) -> int:
    """Parameters of the tables of tokens and of positions."""
    model = config.model
    positions = model.context_length if model.positions == "learned" else 0
    return (model.token_rows + positions) * model.n_embd

"""What a configuration asks for, without a GPU, data or PyTorch: `train.py CONFIG --dry-run`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from configs.reader import to_yaml
from data.lra.store import Manifest as Examples
from data.text.shards import MANIFEST, Manifest
from model.flops import count_params, hours_at, train_flops_per_token
from training.classification.config import ClassifyConfig
from training.language.config import TrainConfig
from training.language.memory import GIB, estimate, largest_micro_batch
from training.tasks import RunConfiguration, read_run

FLAG = "--dry-run"
CARDS = (16, 24, 40, 80, 141)  # GiB of GPUs that people have
SPARE = 0.92  # of a card's memory: the rest is CUDA's, and of what allocations leave between them
UTILISATION = 0.5  # of a GPU's peak, about what ours reach on an H100 at short contexts
MOST_EPOCHS = 10
CLOCK = "H100 80GB HBM3"


def dry_run_if_asked(argv: Sequence[str]) -> None:
    """Where --dry-run, or --dry-run=GPUS, is an argument: print what the run would be, and exit.

    Raises:
        ConfigError: the configuration is none.
        ValueError: GPUS is no number of them, or the batch cannot be shared by so many.
    """
    asked = [argument for argument in argv if argument.partition("=")[0] == FLAG]
    if not asked:
        return
    _, _, count = asked[-1].partition("=")
    if count and (not count.isdecimal() or int(count) < 1):
        raise ValueError(f"{FLAG}={count} must be a number of GPUs, at least 1: {FLAG}=8, say")
    config = read_run([argument for argument in argv if argument not in asked])
    sys.stdout.write(dry_run(config, int(count or 1)))
    sys.stdout.flush()
    raise SystemExit(0)


def dry_run(config: RunConfiguration, n_gpus: int) -> str:
    """The configuration, and below it what it amounts to on so many GPUs."""
    lines = [to_yaml(config).rstrip(), ""]
    if not isinstance(config, TrainConfig):
        lines += [
            f"a step: {config.optim.batch_size:,} examples of {config.model.context_length:,} "
            f"tokens on {n_gpus} GPU(s); parameters, FLOPs and memory are reported for GPTs only",
            *_epochs_of_examples(config),
        ]
        return "\n".join(lines) + "\n"
    model, optim = config.model, config.optim
    n_params = count_params(model)
    positions = model.context_length * model.n_embd if model.positions == "learned" else 0
    accumulated = config.grad_accum_steps(n_gpus)
    causal, full = (train_flops_per_token(model, causal=half) for half in (True, False))
    n_tokens = optim.max_steps * optim.batch_tokens
    lines += [
        f"{n_params + positions:,} parameters, {positions:,} of them learned positions",
        f"a step: {accumulated} micro-batches x {config.readers(n_gpus)} x "
        f"{optim.micro_batch_size} sequences x {model.context_length:,} tokens "
        f"= {optim.batch_tokens:,} tokens",
        f"{optim.max_steps:,} steps: {n_tokens:,} tokens, {n_tokens / n_params:.1f} a parameter",
        f"{causal:.3g} FLOPs a token, {full:.3g} if all of attention counts; "
        f"{causal * n_tokens:.3g} the whole run",
        f"{hours_at(causal * n_tokens, CLOCK, UTILISATION) / n_gpus:.3g} hours on {n_gpus} x H100 "
        f"at {UTILISATION:.0%} of their peak",
        *_memory(config, n_gpus),
    ]
    lines += _epochs(config)
    return "\n".join(lines) + "\n"


def _epochs(config: TrainConfig) -> list[str]:
    """How often the run sees each text that is prepared, and a warning where that is too often."""
    data, optim = config.data, config.optim
    weights = {data.path: data.weight} | {corpus.path: corpus.weight for corpus in data.mix}
    lines = []
    for path, weight in weights.items():
        if not (Path(path) / MANIFEST).is_file():
            taken = f": model.vocab_size={config.model.vocab_size} is taken"
            lines += [f"data.path={path} is not there yet{taken if path == data.path else ''}"]
            continue
        n_tokens = Manifest.load(Path(path)).splits["train"].tokens
        a_step = optim.batch_tokens * weight / sum(weights.values())
        epochs = optim.max_steps * a_step / n_tokens
        lines += [f"{epochs:,.2f} epochs of the {n_tokens:,} tokens of {path}"]
        if epochs > MOST_EPOCHS:
            most = max(1, int(MOST_EPOCHS * n_tokens / a_step))
            lines += [
                f"warning: a GPT memorizes a text that it sees more than {MOST_EPOCHS} times. Set "
                f"optim.max_steps={most}, or prepare more text"
            ]
    return lines


def _epochs_of_examples(config: ClassifyConfig) -> list[str]:
    """How often the run sees the examples of data.path, if they are prepared."""
    path = Path(config.data.path)
    if not (path / MANIFEST).is_file():
        return [f"data.path={path} is not there yet"]
    steps = config.optim.max_steps - sum(phase.steps for phase in config.data.phases)
    n = Examples.load(path).splits["train"].examples
    return [f"{steps * config.optim.batch_size / n:,.2f} epochs of the {n:,} examples of {path}"]


def _memory(config: TrainConfig, n_gpus: int) -> list[str]:
    needed = estimate(config, config.optim.micro_batch_size, n_gpus)
    parts = f"{needed.state / GIB:.1f} weights and AdamW"
    forward = f"{needed.activations / GIB:.1f} activations, {needed.head / GIB:.1f} loss"
    gradients = f"{needed.gradients / GIB:.1f} gradients"
    parts += f", {gradients}, {forward}" if needed.accumulates else f", {forward}, or {gradients}"
    if needed.receive_buffers:
        parts += f", {needed.receive_buffers / GIB:.1f} to exchange keys"
    fits = []
    for card in CARDS:
        most = largest_micro_batch(config, card * GIB * SPARE, n_gpus)
        fits.append(f"{card} GiB: {most}" if most else f"{card} GiB: none")
    return [
        f"about {needed.total / GIB:.1f} GiB a GPU with run.compile: {parts}",
        f"largest optim.micro_batch_size on a card of {', '.join(fits)}",
    ]

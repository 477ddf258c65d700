"""Passes of a run over its data, estimated without a GPU: lines of --dry-run and of the start."""

from collections.abc import Sequence
from pathlib import Path

from data.lra.store import Manifest as Examples
from data.text.shards import MANIFEST, Manifest, TokenStream
from training.classification.config import ClassifyConfig
from training.language.config import TrainConfig

MAX_EPOCHS, GOOD_EPOCHS = 10, 4
MIN_STEPS = 100  # fewer teach nothing, whatever their size


def epoch_lines(config: TrainConfig) -> list[str]:
    """How often the run sees each text that is prepared, and a warning where that is too often."""
    data, optim = config.data, config.optim
    weights = {data.path: data.weight} | {corpus.path: corpus.weight for corpus in data.mix}
    lines = []
    for path, weight in weights.items():
        if not (Path(path) / MANIFEST).is_file():
            taken = f": model.vocab_size={config.model.vocab_size} is taken"
            lines += [f"data.path={path} is not there yet{taken if path == data.path else ''}"]
            continue
        kept = kept_tokens(config, path)
        epochs = passes(config, kept) * weight / sum(weights.values())
        lines += [f"{epochs:,.{2 if epochs < 100 else 0}f} epochs of {_text(config, path, kept)}"]
        if epochs > MAX_EPOCHS:
            steps = int(GOOD_EPOCHS * optim.max_steps / epochs)
            smaller = optim.micro_batch_size * config.model.context_length
            lines += [
                f"warning: a GPT memorizes a text that it sees more than {MAX_EPOCHS} times. "
                + ("Try data.align=none, which cuts nothing. " if data.align != "none" else "")
                + (
                    f"Set optim.max_steps={steps} for {GOOD_EPOCHS} epochs, or prepare more text"
                    if steps >= MIN_STEPS
                    else f"A step takes {epochs / optim.max_steps:.0%} of it: set a smaller "
                    f"optim.batch_tokens ({smaller} is one micro-batch), or prepare more text"
                )
            ]
    return lines


def kept_tokens(config: TrainConfig, path: str) -> list[int]:
    """Number of tokens of a prepared text that a pass over it sees, in each stage."""
    n_tokens = Manifest.load(Path(path)).splits["train"].tokens
    if config.data.align == "none":
        return [n_tokens] * len(config.stages)
    from data.sampler import DocumentSampler  # loads PyTorch, which --dry-run otherwise avoids

    starts = TokenStream(path, "train").document_starts
    kept = {
        context: n_tokens - DocumentSampler(starts, n_tokens, context, config.run.seed).cut_tokens
        for context in config.model.contexts
    }
    return [kept[stage.context_length] for stage in config.stages]


def passes(config: TrainConfig, kept: Sequence[int]) -> float:
    """Passes of a run over a text of which it sees `kept` tokens in each stage."""
    return sum(stage.tokens / k for stage, k in zip(config.stages, kept, strict=True))


def _text(config: TrainConfig, path: str, kept: Sequence[int]) -> str:
    """Name of a text, with the number of tokens that a pass over it sees."""
    if len({*kept}) == 1:
        keeps = "" if config.data.align == "none" else f" that data.align={config.data.align} keeps"
        return f"the {kept[0]:,} tokens of {path}{keeps}"
    by_context = {s.context_length: k for s, k in zip(config.stages, kept, strict=True)}
    parts = [f"{k:,} tokens at a context of {context:,}" for context, k in by_context.items()]
    return f"{path}: data.align={config.data.align} keeps {', '.join(parts)}"


def example_epoch_lines(config: ClassifyConfig) -> list[str]:
    """How often the run sees the examples of data.path, if they are prepared."""
    path = Path(config.data.path)
    if not (path / MANIFEST).is_file():
        return [f"data.path={path} is not there yet"]
    steps = config.optim.max_steps - sum(phase.steps for phase in config.data.phases)
    n = Examples.load(path).splits["train"].examples
    return [f"{steps * config.optim.batch_size / n:,.2f} epochs of the {n:,} examples of {path}"]

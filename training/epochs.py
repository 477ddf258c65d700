"""Passes of a run over its data, estimated without a GPU: lines of --dry-run and of the start."""

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
        n_tokens = kept_tokens(config, path)
        a_step = optim.batch_tokens * weight / sum(weights.values())
        epochs = optim.max_steps * a_step / n_tokens
        digits = 2 if epochs < 100 else 0
        line = f"{epochs:,.{digits}f} epochs of the {n_tokens:,.0f} tokens of {path}"
        lines += [line if data.align == "none" else f"{line} that data.align={data.align} keeps"]
        if epochs > MAX_EPOCHS:
            steps = int(GOOD_EPOCHS * n_tokens / a_step)
            smaller = optim.micro_batch_size * config.model.context_length
            lines += [
                f"warning: a GPT memorizes a text that it sees more than {MAX_EPOCHS} times. "
                + ("Try data.align=none, which cuts nothing. " if data.align != "none" else "")
                + (
                    f"Set optim.max_steps={steps} for {GOOD_EPOCHS} epochs, or prepare more text"
                    if steps >= MIN_STEPS
                    else f"A step takes {a_step / n_tokens:.0%} of it: set a smaller "
                    f"optim.batch_tokens ({smaller} is one micro-batch), or prepare more text"
                )
            ]
    return lines


def kept_tokens(config: TrainConfig, path: str) -> float:
    """Number of tokens of a prepared text that a pass over it sees, the mean over all stages."""
    n_tokens = Manifest.load(Path(path)).splits["train"].tokens
    if config.data.align == "none":
        return n_tokens
    from data.sampler import DocumentSampler  # loads PyTorch, which --dry-run otherwise avoids

    starts, passes = TokenStream(path, "train").document_starts, 0.0
    for stage in config.stages:
        sampler = DocumentSampler(starts, n_tokens, stage.context_length, config.run.seed)
        passes += stage.steps / config.optim.max_steps / (n_tokens - sampler.cut_tokens)
    return 1.0 / passes


def example_epoch_lines(config: ClassifyConfig) -> list[str]:
    """How often the run sees the examples of data.path, if they are prepared."""
    path = Path(config.data.path)
    if not (path / MANIFEST).is_file():
        return [f"data.path={path} is not there yet"]
    steps = config.optim.max_steps - sum(phase.steps for phase in config.data.phases)
    n = Examples.load(path).splits["train"].examples
    return [f"{steps * config.optim.batch_size / n:,.2f} epochs of the {n:,} examples of {path}"]

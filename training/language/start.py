"""Prepare a GPT's run: open its data, load initial weights, collect settings that must match."""

from pathlib import Path
from typing import Any

import torch

from data.sampler import ROUND, ShuffledRange
from data.text.batches import ShuffledBatches, TrainBatches
from data.text.mixture import MixedBatches, Mixture
from data.text.shards import TOKENIZER, TokenStream
from data.text.tokenizer import load_tokenizer
from model.config import ModelConfig
from model.extend import ROTARY, differences, differing, with_context_length
from model.gpt import GPT
from training.checkpoint.choice import find_checkpoint
from training.checkpoint.contents import put_weights, shared_settings
from training.checkpoint.folders import checkpoints
from training.checkpoint.reader import Checkpoint
from training.distributed import Processes
from training.language.config import TrainConfig
from training.language.stages import Stage, tokens_before
from training.tasks import config_of


def check_vocabulary(config: TrainConfig, stream: TokenStream) -> None:
    """Check that the data's tokenizer fits the model and is the one stored with the data.

    With run.init_from the model may have more ids than the tokenizer; `load_initial_weights` then
    compares the tokenizers themselves.
    """
    tokenizer = stream.manifest.tokenizer
    vocab_size = config.model.vocab_size
    is_new = config.run.init_from is None
    if tokenizer.vocab_size > vocab_size or (is_new and tokenizer.vocab_size != vocab_size):
        raise ValueError(
            f"model.vocab_size={vocab_size} must be {tokenizer.vocab_size}, the size of tokenizer "
            f"{tokenizer.name!r} of data.path={config.data.path}. Remove model.vocab_size to use "
            "that size, or prepare the data with the model's tokenizer. It may be larger only with "
            "run.init_from"
        )
    path = stream.path / TOKENIZER
    if load_tokenizer(str(path)).sha256 != tokenizer.sha256:
        raise ValueError(f"{path} was replaced. Prepare data.path={config.data.path} again")


def open_corpora(config: TrainConfig, split: str) -> dict[str, TokenStream]:
    """Open the token streams of data.path and data.mix, by folder name, data.path first.

    Raises:
        ValueError, FileNotFoundError: one is missing, has another tokenizer, or has the same name.
    """
    data = config.data
    first = TokenStream(data.path, split)
    streams = {first.path.resolve().name: first}
    for corpus in data.mix:
        stream = TokenStream(corpus.path, split)
        tokenizer, expected = stream.manifest.tokenizer, first.manifest.tokenizer
        if tokenizer.sha256 != expected.sha256:
            raise ValueError(
                f"data.mix: {corpus.path} has the tokenizer {tokenizer.name!r} (sha256 "
                f"{tokenizer.sha256[:12]}) and must have that of data.path={data.path}, "
                f"{expected.name!r} ({expected.sha256[:12]}). Prepare it with --tokenizer "
                f"{data.path}/{TOKENIZER}"
            )
        name = stream.path.resolve().name
        if name in streams:
            raise ValueError(
                f"data.mix: {corpus.path} and {streams[name].path} must have different folder "
                "names, which identify them in the records. Rename one of the folders"
            )
        streams[name] = stream
    return streams


def mixture(config: TrainConfig) -> Mixture:
    """Mixture of data.path and the corpora of data.mix."""
    weights = [config.data.weight, *(corpus.weight for corpus in config.data.mix)]
    return Mixture(weights, config.run.seed)


def cut_corpora(
    config: TrainConfig, stage: Stage, streams: dict[str, TokenStream]
) -> list[TrainBatches]:
    """Cut each corpus into the samples of a stage.

    All stages cut the text into the same windows of model.context_length. A stage with a shorter
    context cuts these into parts. With data.align=document, it has windows of its own instead,
    because parts begin anywhere.
    """
    return [
        TrainBatches(
            stream,
            stage.context_length,
            seed=config.run.seed,
            document_mask=config.data.document_mask,
            consecutive_windows=_parts(config, stage) * config.data.consecutive_windows,
            align=config.data.align,
        )
        for stream in streams.values()
    ]


def _parts(config: TrainConfig, stage: Stage) -> int:
    """Number of samples of a stage that are cut from one window of model.context_length."""
    aligned = config.data.align == "document"
    return 1 if aligned else config.model.context_length // stage.context_length


def make_batches(
    config: TrainConfig, stage: Stage, corpora: list[TrainBatches]
) -> TrainBatches | MixedBatches | ShuffledBatches:
    """Create the batches of a stage: the samples of its steps, mixed if there are several corpora.

    Parts of the windows of model.context_schedule are visited in a random order.
    """
    source = MixedBatches(corpora, mixture(config)) if config.data.mix else corpora[0]
    if _parts(config, stage) == 1:
        return source
    first, last = (
        tokens_before(config.stages, step) // stage.context_length
        for step in (stage.first_step, stage.last_step)
    )
    # The corpora of a mixture have epochs of their own.
    epoch = ROUND if config.data.mix else corpora[0].samples_per_epoch
    return ShuffledBatches(source, ShuffledRange(first, last, config.run.seed, epoch))


def load_initial_weights(
    folder: Path,
    model: GPT,
    stream: TokenStream,
    processes: Processes,
    choice: str | int | None = None,
) -> tuple[str, int]:
    """Load the weights of a checkpoint of another run, by default its newest, into `model`.

    Returns:
        The checkpoint as text, with any differences in rotary settings; and its step.

    Raises:
        ValueError, FileNotFoundError: `folder` is not a run, or has another model or tokenizer.
    """

    def choose() -> Path:
        if not checkpoints(folder):
            raise FileNotFoundError(
                f"run.init_from={folder} has no checkpoint. Give the folder of a run with one in "
                "checkpoints/, or remove run.init_from to start from random weights"
            )
        return find_checkpoint(folder, choice)

    checkpoint = Checkpoint.open(processes.run_on_main(choose))
    config_of(folder, TrainConfig)  # raises a clear error for a classifier's run
    config = checkpoint.config(TrainConfig).model
    reasons = differences(config, model.config)
    own = stream.manifest.tokenizer.sha256
    stored = load_tokenizer(str(folder / TOKENIZER)).sha256
    # The file may have been replaced, so also check the tokenizer of the checkpoint. Older imports
    # did not record it.
    recorded = str(checkpoint.must_match.get("tokenizer", stored))
    for sha256 in dict.fromkeys((stored, recorded)):
        if sha256 != own:
            reasons.append(f"its tokenizer has sha256 {sha256}, that of this run has {own}")
    if reasons:
        raise ValueError(
            f"run.init_from={folder} has another model: {'; '.join(reasons)}. Use its values, or "
            "start from other weights"
        )
    with torch.device("meta"):
        like = GPT(config).state_dict()
    weights = checkpoint.weights(like)
    put_weights(model, with_context_length(weights, model.config.context_length))
    notes = [*differing(ROTARY, config, model.config), *_too_little_scaling(config, model.config)]
    return "; ".join([str(checkpoint.folder), *notes]), checkpoint.progress.step


def _too_little_scaling(source: ModelConfig, target: ModelConfig) -> list[str]:
    """Warn if scaled positions of the source would be scaled less than its context is extended."""
    needed = source.rope_factor * target.context_length / source.context_length
    if source.rope_scaling == "none" or target.rope_factor >= needed:
        return []
    return [
        f"warning: these positions were trained with model.rope_factor={source.rope_factor:g}. For "
        f"{target.context_length:,} instead of {source.context_length:,} tokens, set "
        f"model.rope_factor={needed:g}"
    ]


def must_match(config: TrainConfig, streams: dict[str, TokenStream]) -> dict[str, Any]:
    """Settings and data that must match a checkpoint to resume from it."""
    stream, *others = streams.values()
    mix = {}
    if config.data.mix:
        weights = [corpus.weight for corpus in config.data.mix]
        mix = {
            "data.weight": config.data.weight,
            "data.mix": [[len(s), weight] for s, weight in zip(others, weights, strict=True)],
        }
    stages = {}
    for what, setting, scheduled in (
        ("context_length", "model.context_schedule", config.model.context_schedule),
        ("batch_tokens", "optim.batch_schedule", config.optim.batch_schedule),
    ):
        if scheduled:
            firsts = [[getattr(stage, what), stage.first_step + 1] for stage in config.stages]
            noun = "context" if what == "context_length" else "batch size"
            name = f"first step of each {noun} (shares of optim.max_steps in {setting})"
            # Stages that differ only in the other setting begin with the same value.
            values = [None, *(value for value, _ in firsts)]
            stages[name] = [x for x, old in zip(firsts, values, strict=False) if x[0] != old]
    return (
        shared_settings(config)
        | mix
        | stages
        | {
            "data.align": config.data.align,
            "data.document_mask": config.data.document_mask,
            "data.consecutive_windows": config.data.consecutive_windows,
            "optim.batch_tokens": config.optim.batch_tokens,
            "tokenizer": stream.manifest.tokenizer.sha256,
            "training tokens": len(stream),
        }
    )

"""What a GPT's run may start with: data, first weights, and its own checkpoints."""

from pathlib import Path
from typing import Any

import torch

from data.text.batches import TrainBatches
from data.text.mixture import MixedBatches, Mixture
from data.text.shards import TOKENIZER, TokenStream
from data.text.tokenizer import load_tokenizer
from model.extend import ROTARY, differences, differing, with_context_length
from model.gpt import GPT
from training.checkpoint.choice import chosen_checkpoint
from training.checkpoint.contents import put_weights, shared_settings
from training.checkpoint.folders import checkpoints
from training.checkpoint.reader import Checkpoint
from training.distributed import Processes
from training.language.config import TrainConfig
from training.tasks import config_of


def check_vocabulary(config: TrainConfig, stream: TokenStream) -> None:
    """Refuse data made with another tokenizer than the model is for, or than lies beside them.

    The model of another run may know more ids than its tokenizer: `load_first_weights` compares
    the tokenizers themselves.
    """
    tokenizer = stream.manifest.tokenizer
    known = config.model.vocab_size
    fresh = config.run.init_from is None
    if tokenizer.vocab_size > known or (fresh and tokenizer.vocab_size != known):
        raise ValueError(
            f"data.path={config.data.path} was made with the tokenizer {tokenizer.name!r} of "
            f"{tokenizer.vocab_size} entries, and model.vocab_size={known}: leave it out, so that "
            f"it is {tokenizer.vocab_size}, or prepare the data with the model's tokenizer; only "
            "run.init_from may bring a model of more ids"
        )
    beside = stream.path / TOKENIZER
    if load_tokenizer(str(beside)).sha256 != tokenizer.sha256:
        raise ValueError(f"{beside} was replaced: prepare data.path={config.data.path} again")


def open_corpora(config: TrainConfig, split: str) -> dict[str, TokenStream]:
    """The streams of data.path and of data.mix, by what they are called, data.path's first.

    Raises:
        ValueError, FileNotFoundError: one is not there, or was made with another tokenizer.
    """
    data = config.data
    first = TokenStream(data.path, split)
    streams = {first.path.resolve().name: first}
    for corpus in data.mix:
        stream = TokenStream(corpus.path, split)
        here, there = stream.manifest.tokenizer, first.manifest.tokenizer
        if here.sha256 != there.sha256:
            raise ValueError(
                f"data.mix: {corpus.path} was made with the tokenizer {here.name!r} (sha256 "
                f"{here.sha256[:12]}), and data.path={data.path} with {there.name!r} "
                f"({there.sha256[:12]}): prepare it with --tokenizer {data.path}/{TOKENIZER}"
            )
        name = stream.path.resolve().name
        if name in streams:
            raise ValueError(
                f"data.mix: {corpus.path} and {streams[name].path} have one name, by which records "
                "tell them apart: rename one of the folders"
            )
        streams[name] = stream
    return streams


def make_batches(
    config: TrainConfig, streams: dict[str, TokenStream]
) -> TrainBatches | MixedBatches:
    """Training batches of the corpora, by weight if there are several."""
    corpora = [
        TrainBatches(
            stream,
            config.model.context_length,
            seed=config.run.seed,
            document_mask=config.data.document_mask,
            consecutive_windows=config.data.consecutive_windows,
        )
        for stream in streams.values()
    ]
    if not config.data.mix:
        return corpora[0]
    weights = [config.data.weight, *(corpus.weight for corpus in config.data.mix)]
    return MixedBatches(corpora, Mixture(weights, config.run.seed))


def load_first_weights(
    folder: Path,
    model: GPT,
    stream: TokenStream,
    processes: Processes,
    choice: str | int | None = None,
) -> tuple[str, int]:
    """Give `model` the weights of the newest checkpoint of another run, or of the chosen one.

    Returns:
        The checkpoint, and how rotary positions are turned otherwise there; and its step.

    Raises:
        ValueError, FileNotFoundError: `folder` is no run, or one of another model or tokenizer.
    """

    def choose() -> Path:
        if not checkpoints(folder):
            raise FileNotFoundError(
                f"run.init_from={folder} has no checkpoint: name the folder of a run that has one "
                "in checkpoints/, or leave it out to start with random weights"
            )
        return chosen_checkpoint(folder, choice)

    checkpoint = Checkpoint.open(processes.main_does(choose))
    config_of(folder, TrainConfig)  # a classifier's run is named as such
    config = checkpoint.config(TrainConfig).model
    reasons = differences(config, model.config)
    here = stream.manifest.tokenizer.sha256
    of_folder = load_tokenizer(str(folder / TOKENIZER)).sha256
    # what the weights were trained with, should the file have been replaced; older imports lack it
    recorded = str(checkpoint.must_match.get("tokenizer", of_folder))
    for sha256 in dict.fromkeys((of_folder, recorded)):
        if sha256 != here:
            reasons.append(f"the tokenizer has sha256 {sha256} there and {here} here")
    if reasons:
        raise ValueError(
            f"run.init_from={folder} is a run of another model: {'; '.join(reasons)}. "
            "Use the values there, or start with other weights"
        )
    with torch.device("meta"):
        there = GPT(config)
    weights = checkpoint.weights(there.state_dict())
    put_weights(model, with_context_length(weights, model.config.context_length))
    text = "; ".join([str(checkpoint.folder), *differing(ROTARY, config, model.config)])
    return text, checkpoint.progress.step


def must_match(config: TrainConfig, streams: dict[str, TokenStream]) -> dict[str, Any]:
    """What a run must share with the checkpoint that it goes on from."""
    stream, *others = streams.values()
    mixed = {}
    if config.data.mix:
        weights = [corpus.weight for corpus in config.data.mix]
        mixed = {
            "data.weight": config.data.weight,
            "data.mix": [[len(s), weight] for s, weight in zip(others, weights, strict=True)],
        }
    return (
        shared_settings(config)
        | mixed
        | {
            "data.document_mask": config.data.document_mask,
            "data.consecutive_windows": config.data.consecutive_windows,
            "optim.batch_tokens": config.optim.batch_tokens,
            "tokenizer": stream.manifest.tokenizer.sha256,
            "training tokens": len(stream),
        }
    )

"""Open the folder of a run: its configuration, its tokenizer, and its newest weights."""

from dataclasses import dataclass
from pathlib import Path

from configs import TrainConfig, load_config
from data.shards import TOKENIZER
from data.tokenizer import TextTokenizer, load_tokenizer
from model import GPT
from training.checkpoint import Progress, latest_checkpoint, load_model

CONFIG = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model and what belongs to it."""

    folder: Path
    config: TrainConfig
    tokenizer: TextTokenizer
    model: GPT
    """On the CPU, in evaluation mode, float32."""
    progress: Progress
    """How far it was trained."""


def open_run(folder: Path) -> Run:
    """The run in `folder` with the weights of its newest checkpoint.

    Raises:
        FileNotFoundError: the folder lacks its configuration, its tokenizer or a checkpoint.
        ConfigError: the configuration is none.
    """
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        raise FileNotFoundError(f"{folder} has no checkpoint yet: train it first, with train.py")
    config = load_config([str(folder / CONFIG)])
    tokenizer = load_tokenizer(str(folder / TOKENIZER))
    model = GPT(config.model)
    progress = load_model(checkpoint, model)
    return Run(
        folder=folder,
        config=config,
        tokenizer=tokenizer,
        model=model.eval(),
        progress=progress,
    )

"""Registry of tasks and their configuration schemas. Does not import PyTorch."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from configs.help import settings_help
from configs.reader import read_task_config
from training.classification.config import ClassifyConfig
from training.config import RUN_CONFIG
from training.language.config import TrainConfig

RunConfiguration = TrainConfig | ClassifyConfig
C = TypeVar("C", bound=RunConfiguration)

_NAMES = {TrainConfig: "GPT", ClassifyConfig: "classifier"}
_HINTS = {
    TrainConfig: "evaluate it with scripts.evaluate, and generate text with scripts.sample",
    ClassifyConfig: "its accuracies are in metrics.jsonl; plot them with scripts.plot_run",
}

SCHEMAS: dict[str, type[RunConfiguration]] = {
    "language": TrainConfig,
    "classification": ClassifyConfig,
}
"""Configuration schemas by task name; the first is the default."""


def read_run(argv: Sequence[str]) -> RunConfiguration:
    """Read the configuration of a run from a command line; its `task` selects the schema.

    Raises:
        ConfigError: a missing or unreadable file, an unknown key, a wrong type or value.
    """
    return read_task_config(SCHEMAS, argv)


def handle_settings_help(text: str | None, argv: Sequence[str]) -> None:
    """If -h or --help is given, print `text` and all settings, and exit.

    If a configuration is given, they are its settings and values; otherwise a GPT's defaults.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    others = [argument for argument in argv if argument not in ("-h", "--help")]
    if len(others) == len(argv):
        return
    config = read_task_config(SCHEMAS, others) if others else None
    schema = TrainConfig if config is None else type(config)
    if config is None:
        heading = """\
Settings of a GPT, with their defaults. `train.py CONFIG --help` shows the settings and values of
another file, for example of a classifier: configs/lra/image.yaml."""
    else:
        heading = f"Settings of task={config.task}, with their values in {' '.join(others)}:"
    text = f"{(text or '').strip()}\n\n{heading}"
    usage = "train.py CONFIG [key=value ...]"
    sys.stdout.write(settings_help(schema, text, usage=usage, config=config))
    sys.stdout.flush()  # here, where a closed pipe is still handled
    raise SystemExit(0)


def config_of(run: Path, schema: type[C]) -> C:
    """Read the configuration of a run, which must have the task of `schema`.

    Raises:
        ValueError: the run has another task.
        ConfigError: the configuration is missing or cannot be read.
    """
    config = read_task_config(SCHEMAS, [str(run / RUN_CONFIG)], of_a_run=True)
    if not isinstance(config, schema):
        raise ValueError(
            f"{run} must be a run of a {_NAMES[schema]}, but is one of a {_NAMES[type(config)]} "
            f"(task={config.task}): {_HINTS[type(config)]}"
        )
    return config

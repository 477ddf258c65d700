"""Which tasks there are, and how their runs are configured. This needs no PyTorch."""

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
_OTHERS = {
    TrainConfig: "scripts.evaluate scores it, and scripts.sample lets it write",
    ClassifyConfig: "metrics.jsonl has its accuracies, and scripts.plot_run draws them",
}

SCHEMAS: dict[str, type[RunConfiguration]] = {
    "language": TrainConfig,
    "classification": ClassifyConfig,
}
"""By the name of the task; the first is that of a configuration which names none."""


def read_run(argv: Sequence[str]) -> RunConfiguration:
    """The configuration of a run from a command line, by the `task` that it names.

    Raises:
        ConfigError: no or an unreadable file, an unknown key, a wrong type or value.
    """
    return read_task_config(SCHEMAS, argv)


def explain_if_asked(text: str | None, argv: Sequence[str]) -> None:
    """Where -h or --help is an argument, print `text` and all settings, and exit.

    They are those of the configuration that is named, with its values, or else those of a GPT.

    Raises:
        ConfigError: there is no such configuration.
    """
    others = [argument for argument in argv if argument not in ("-h", "--help")]
    if len(others) == len(argv):
        return
    config = read_task_config(SCHEMAS, others) if others else None
    schema = TrainConfig if config is None else type(config)
    if config is None:
        shown = """\
Settings of a GPT, with their defaults. `train.py CONFIG --help` shows those of another file, with
its values: of a classifier's, say, configs/lra/image.yaml."""
    else:
        shown = f"Settings of task={config.task}, with their values in {' '.join(others)}:"
    text = f"{(text or '').strip()}\n\n{shown}"
    usage = "train.py CONFIG [key=value ...]"
    sys.stdout.write(settings_help(schema, text, usage=usage, config=config))
    sys.stdout.flush()  # while a reader that has seen enough is no error
    raise SystemExit(0)


def config_of(run: Path, schema: type[C]) -> C:
    """The configuration of the run in a folder, which must be of one task.

    Raises:
        ValueError: it is of the other one.
        ConfigError: the folder has none, or one that cannot be read.
    """
    config = read_run([str(run / RUN_CONFIG)])
    if not isinstance(config, schema):
        raise ValueError(
            f"{run} is a run of a {_NAMES[type(config)]} (task: {config.task}), where one of a "
            f"{_NAMES[schema]} is needed: {_OTHERS[type(config)]}"
        )
    return config

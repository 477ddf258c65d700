"""Which tasks there are, and how their runs are configured. This needs no PyTorch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

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


def read_run(argv: Sequence[str]) -> RunConfiguration:
    """The configuration of a run from a command line, by the `task` that it names.

    Raises:
        ConfigError: no or an unreadable file, an unknown key, a wrong type or value.
    """
    schemas = {"language": TrainConfig, "classification": ClassifyConfig}
    return read_task_config(schemas, argv)


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

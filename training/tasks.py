"""Which tasks there are, and how their runs are configured. This needs no PyTorch."""

from collections.abc import Sequence

from configs.reader import read_task_config
from training.classification.config import ClassifyConfig
from training.language.config import TrainConfig

RunConfiguration = TrainConfig | ClassifyConfig


def read_run(argv: Sequence[str]) -> RunConfiguration:
    """The configuration of a run from a command line, by the `task` that it names.

    Raises:
        ConfigError: no or an unreadable file, an unknown key, a wrong type or value.
    """
    schemas = {"language": TrainConfig, "classification": ClassifyConfig}
    return read_task_config(schemas, argv)

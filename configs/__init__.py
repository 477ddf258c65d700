"""Run configurations: complete YAML files, and the schema that they must fit."""

from configs.classify import ClassifyConfig
from configs.schema import (
    RUN_CONFIG,
    ConfigError,
    RunConfig,
    TrainConfig,
    from_yaml,
    load_config,
    read_config,
    to_yaml,
)

__all__ = [
    "RUN_CONFIG",
    "ClassifyConfig",
    "ConfigError",
    "RunConfig",
    "TrainConfig",
    "from_yaml",
    "load_config",
    "read_config",
    "to_yaml",
]

"""Run configurations: complete YAML files, and the schema that they must fit."""

from configs.schema import ConfigError, RunConfig, TrainConfig, load_config, to_yaml

__all__ = ["ConfigError", "RunConfig", "TrainConfig", "load_config", "to_yaml"]

"""How a configuration is filled, whatever its schema: a frozen dataclass of dataclasses.

defaults <- the YAML file <- key=value on the command line
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import omegaconf
import yaml
from omegaconf import DictConfig, OmegaConf

C = TypeVar("C")


class ConfigError(ValueError):
    """A configuration that no run can be made of; the message says which field and why."""


def read_config(schema: type[C], argv: Sequence[str]) -> C:
    """The configuration from a command line: a YAML file, then any number of key=value.

    Raises:
        ConfigError: no or an unreadable file, an unknown key, a wrong type or value.
    """
    path, *parts = _parse(argv)
    return _config_of(schema, parts, path)


def read_task_config(schemas: Mapping[str, type[C]], argv: Sequence[str]) -> C:
    """The configuration from a command line as `read_config` takes it, in the schema of its `task`.

    The first schema is that of a configuration which names no task.

    Raises:
        ConfigError: as `read_config`, or the task is not known.
    """
    path, *parts = _parse(argv)
    merged = OmegaConf.merge(*parts)
    task = OmegaConf.select(merged, "task", default=next(iter(schemas)))
    if task not in schemas:
        raise ConfigError(f"task={task} must be one of {', '.join(schemas)}: set it in {path}")
    try:
        return _config_of(schemas[task], parts, path)
    except ConfigError as error:
        if "task" in merged:
            raise
        raise ConfigError(f"{error} (taken for task={task}, as {path} names none)") from error


def from_yaml(schema: type[C], text: str) -> C:
    """What `to_yaml` wrote; a setting that is new since then has its default.

    Raises:
        ConfigError: a setting is not known here.
    """
    values = OmegaConf.create(text)
    assert isinstance(values, DictConfig)
    return _config_of(schema, [values], "the configuration of a run")


def _parse(argv: Sequence[str]) -> tuple[str, DictConfig, DictConfig]:
    """The file's name, what it says, and what replaces some of it."""
    if not argv or ("=" in argv[0] and not Path(argv[0]).is_file()):
        raise ConfigError("name a configuration first: train.py configs/quickstart.yaml key=value")
    path, overrides = Path(argv[0]), OmegaConf.create({})
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; the configurations that come along are configs/*")
    from_file = _read_yaml(path)
    for override in argv[1:]:
        if "=" not in override or override.startswith("-"):
            raise ConfigError(f"{override!r} must read key=value, for example optim.lr=3e-4")
        try:
            overrides.merge_with_dotlist([override])
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{override!r} must hold YAML after its first '=', and cannot be read as such: "
                f"{' '.join(str(error).split())}"
            ) from error
    return str(path), from_file, overrides


def _config_of(schema: type[C], parts: Sequence[DictConfig], source: str) -> C:
    """Later parts replace values of earlier ones."""
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), *parts))
    except omegaconf.errors.MissingMandatoryValue as error:
        raise ConfigError(
            f"{error.full_key} has no value: set it in {source} or on the command line"
        ) from error
    except omegaconf.errors.OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{error.full_key or source}: {reason}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    assert isinstance(config, schema)
    return config


def _read_yaml(path: Path) -> DictConfig:
    try:
        values = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path} must be a YAML file, and cannot be read as one: {reason}"
        ) from error
    if not isinstance(values, DictConfig):
        raise ConfigError(
            f"{path} must map model, data, optim and run to their values, and holds a list: see "
            "configs/quickstart.yaml"
        )
    return values


def to_yaml(config: Any) -> str:
    """The whole configuration as YAML, which `read_config` and `from_yaml` read back."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))

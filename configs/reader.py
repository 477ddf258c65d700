"""How a configuration is filled, whatever its schema: a frozen dataclass of dataclasses.

defaults <- what the data tell <- the YAML file <- key=value on the command line
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import omegaconf
import yaml
from omegaconf import DictConfig, OmegaConf

from configs.settings import Setting, settings_of, written
from configs.suggestions import refuse

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
    others = {f"task={name}": settings_of(s) for name, s in schemas.items() if name != task}
    try:
        return _config_of(schemas[task], parts, path, others)
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


def from_record(schema: type[C], values: dict[str, Any], source: str) -> C:
    """The configuration that `source` recorded with `dataclasses.asdict`, as `from_yaml`."""
    return _config_of(schema, [OmegaConf.create(values)], source)


def _parse(argv: Sequence[str]) -> tuple[str, DictConfig, DictConfig]:
    """The file's name, what it says, and what replaces some of it."""
    if not argv or ("=" in argv[0] and not Path(argv[0]).is_file()):
        raise ConfigError("name a configuration first: train.py configs/quickstart.yaml key=value")
    path, overrides = Path(argv[0]), OmegaConf.create({})
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; the configurations that come along are configs/*")
    from_file = _read_yaml(path)
    for override in argv[1:]:
        if "=" not in override or override.startswith(("-", "=")):
            raise ConfigError(f"{override!r} must read key=value, for example optim.lr=3e-4")
        try:
            overrides.merge_with_dotlist([override])
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{override!r} must hold YAML after its first '=', and cannot be read as such: "
                f"{' '.join(str(error).split())}"
            ) from error
    return str(path), from_file, overrides


def _config_of(
    schema: type[C],
    parts: Sequence[DictConfig],
    source: str,
    others: Mapping[str, Collection[str]] | None = None,
) -> C:
    """Later parts replace values of earlier ones; `others` are keys of other schemas.

    A schema may have a static method `from_data`. It takes all values that are given, by key, and
    returns defaults that depend on the data which they name, likewise.
    """
    known = settings_of(schema)
    given = [
        (at, key, value)
        for at, part in zip((f"{source}: ", ""), parts, strict=False)
        for key, value in _leaves(OmegaConf.to_container(part), known)
    ]
    _check_keys(schema, given, known, others or {})
    try:
        defaults = OmegaConf.structured(schema)
        merged = OmegaConf.merge(defaults, *parts)
        keys = [key for _, key, _ in given if "[]" not in key]
        values = {key: OmegaConf.select(merged, key) for key in keys}
        told = getattr(schema, "from_data", _nothing)(values)
        if told:
            layers = [OmegaConf.create(_nested(*each)) for each in told.items()]
            merged = OmegaConf.merge(defaults, *layers, *parts)
        config = OmegaConf.to_object(merged)
    except omegaconf.errors.MissingMandatoryValue as error:
        key = error.full_key or source
        what = f". It is: {known[key].text}" if key in known else ""
        raise ConfigError(
            f"{key} has no value: set it in {source} or on the command line{what}"
        ) from error
    except omegaconf.errors.OmegaConfBaseException as error:
        # not every one of its errors names the key, and none an item of a list
        wrong: dict[str, str] = {}
        for at, key, value in given:
            if _fails(schema, key, value) and not _inside(f"{key}[]", wrong):
                wrong[key] = at + _must_be(key, value, known)
        if wrong:
            raise ConfigError("\n".join(wrong.values())) from error
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{error.full_key or source}: {reason}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    assert isinstance(config, schema)
    return config


def _check_keys(
    schema: type,
    given: Sequence[tuple[str, str, Any]],
    known: Mapping[str, Setting],
    others: Mapping[str, Collection[str]],
) -> None:
    """Refuse keys that are no setting; `given` are place, key and value of all that is set."""
    # a value at the top, as the task, may mean that all keys are those of another schema
    top = {key: (at, value) for at, key, value in given if key in known and "." not in key}
    of_another = [
        at + _must_be(key, value, known)
        for key, (at, value) in top.items()
        if not isinstance(value, list) and _fails(schema, key, value)
    ]
    unknown = [
        at + refuse(key, known, others)
        for at, key, _ in given
        if key not in known and not _inside(key, known)
    ]
    if of_another or unknown:
        raise ConfigError("\n".join(of_another or unknown))


def _nothing(_: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _leaves(values: Any, known: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Key and value of all that is set; what stands in a list comes before the list."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in known:
            yield from _leaves(value, known, f"{key}.")
            continue
        items = value if isinstance(value, list) and _inside(f"{key}[]", known) else ()
        for item in items:
            if isinstance(item, dict):
                yield from _leaves(item, known, f"{key}[].")
        yield key, value


def _inside(section: str, known: Collection[str]) -> list[str]:
    """What settings a section has; none if it is not one."""
    return [key for key in known if key.startswith(f"{section}.")]


def _fails(schema: type, key: str, value: Any) -> bool:
    """Whether the schema takes no such value, whatever else is set."""
    try:
        OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(_nested(key, value)))
    except omegaconf.errors.OmegaConfBaseException:
        return True
    return False


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name.removesuffix("[]"): [value] if name.endswith("[]") else value}
    return value


def _must_be(key: str, value: Any, known: Mapping[str, Setting]) -> str:
    if inside := _inside(key, known):
        # without those of the items of lists
        names = ", ".join(other.removeprefix(f"{key}.") for other in inside if "[]" not in other)
        return f"{key}={written(value)} must be a section, with values of {names}"
    must = f"{key}={written(value)} must be {known[key].kind}"
    if isinstance(value, float) and value.is_integer() and "whole number" in must:
        must += f", without e or point: {value:.0f}"
    return must


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

"""How a configuration is filled, whatever its schema: a frozen dataclass of dataclasses.

defaults <- values from the data <- the YAML file <- key=value on the command line

Only values of the command line are quoted in errors. Those of a file are named by key and line, as
the file may be somebody else's, or a link to something private.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

from configs import plain_yaml
from configs.settings import Setting, settings_of, written
from configs.suggestions import refuse
from configs.types import MismatchError, convert

C = TypeVar("C")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")
_DEEPEST = 4  # sections in sections that are looked into for a key that is no setting


class ConfigError(ValueError):
    """A configuration that no run can be made of; the message says which field and why."""


@dataclass(frozen=True)
class _Part:
    """Values from one place: a file, or the command line."""

    values: dict[str, Any]
    source: str = ""
    """A file; nothing for the command line."""
    lines: Mapping[str, int] | None = None

    def place(self, key: str) -> str:
        """Where a key is set, as the start of an error."""
        if not self.source:
            return ""
        line = (self.lines or {}).get(key)
        return f"{self.source}, line {line}: " if line else f"{self.source}: "

    def quote(self, key: str, value: Any) -> str:
        """The key, with its value if that may be printed."""
        return key if self.source else f"{key}={written(value)}"

    def name(self, key: str, sections: Collection[str]) -> str:
        """Printable name of a key that is not a setting: from a file, only in a section of ours."""
        first, *others = key.replace("[]", "").split(".")
        public = first in sections and all(map(_NAME.fullmatch, others))
        return key if public or not self.source else "this key"


def read_config(schema: type[C], argv: Sequence[str]) -> C:
    """The configuration from a command line: a YAML file, then any number of key=value.

    Raises:
        ConfigError: no or an unreadable file, an unknown key, a wrong type or value.
    """
    return _config_of(schema, _parse(argv))


def read_task_config(schemas: Mapping[str, type[C]], argv: Sequence[str]) -> C:
    """The configuration from a command line as `read_config` takes it, in the schema of its `task`.

    The first schema is that of a configuration which names no task.

    Raises:
        ConfigError: as `read_config`, or the task is not known.
    """
    parts = _parse(argv)
    by = next((part for part in reversed(parts) if "task" in part.values), None)
    task = by.values["task"] if by else next(iter(schemas))
    if not isinstance(task, str) or task not in schemas:
        assert by is not None
        raise ConfigError(
            f"{by.place('task')}{by.quote('task', task)} must be one of {', '.join(schemas)}: set "
            f"it in {parts[0].source}"
        )
    others = {f"task={name}": settings_of(s) for name, s in schemas.items() if name != task}
    try:
        return _config_of(schemas[task], parts, others)
    except ConfigError as error:
        if by:
            raise
        raise ConfigError(
            f"{error} (taken for task={task}, as {parts[0].source} names none)"
        ) from error


def from_yaml(schema: type[C], text: str) -> C:
    """What `to_yaml` wrote; a setting that is new since then has its default.

    Raises:
        ConfigError: it is not plain YAML, or a setting is not known here.
    """
    source = "the configuration of a run"
    try:
        document = plain_yaml.parse(text)
    except plain_yaml.YamlError as error:
        raise ConfigError(f"{source} is not plain YAML: {error}") from error
    return _config_of(schema, [_part_of(document, source)])


def from_record(schema: type[C], values: dict[str, Any], source: str) -> C:
    """The configuration that `source` recorded with `dataclasses.asdict`, as `from_yaml`."""
    return _config_of(schema, [_Part(values, source)])


def _parse(argv: Sequence[str]) -> list[_Part]:
    """Parse the file and the overrides of a command line."""
    if not argv or ("=" in argv[0] and not Path(argv[0]).is_file()):
        raise ConfigError("name a configuration first: train.py configs/quickstart.yaml key=value")
    path = Path(argv[0])
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; the configurations that come along are configs/*")
    parts = [_read_yaml(path)]
    for override in argv[1:]:
        key, equals, text = override.partition("=")
        if not equals or override.startswith(("-", "=")):
            raise ConfigError(f"{override!r} must read key=value, for example optim.lr=3e-4")
        try:
            value = plain_yaml.parse(text).values
        except plain_yaml.YamlError as error:
            raise ConfigError(
                f"{override!r} must hold YAML after its first '=', and cannot be read as such: "
                f"{error}"
            ) from error
        parts.append(_Part(_nested(key, value)))
    return parts


def _config_of(
    schema: type[C], parts: Sequence[_Part], others: Mapping[str, Collection[str]] | None = None
) -> C:
    """Later parts replace values of earlier ones; `others` are keys of other schemas.

    A schema may have a static method `from_data`. It takes all values that are given, by key, and
    returns defaults that depend on the data which they name, by key.
    """
    known = settings_of(schema)
    _check(parts, known, others or {})
    # From here on these are plain values of the right types: OmegaConf has nothing to fill in.
    layers = [OmegaConf.create(part.values) for part in parts]
    given: Any = OmegaConf.to_container(OmegaConf.merge(*layers))
    leaves = [(key, value) for key, value in _leaves(given, known) if "[]" not in key]
    try:
        from_data = getattr(schema, "from_data", lambda given: {})
        derived = from_data({key: convert(known[key].type, value) for key, value in leaves})
        below = [OmegaConf.create(_nested(key, value)) for key, value in derived.items()]
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), *below, *layers))
    except MissingMandatoryValue as error:
        key, source = error.full_key or "a setting", parts[0].source
        what = f". It is: {known[key].text}" if key in known else ""
        raise ConfigError(
            f"{key} has no value: set it in {source} or on the command line{what}"
        ) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    assert isinstance(config, schema)
    return config


def _check(
    parts: Sequence[_Part], known: Mapping[str, Setting], others: Mapping[str, Collection[str]]
) -> None:
    """Refuse what is no setting, and values of a wrong type; all of them in one error.

    A wrong value at the top that is not replaced, as the task, may mean that all keys are those of
    another schema: it comes first, then unknown keys, then wrong values.
    """
    sections = {key.partition(".")[0] for key in known}
    at_top: list[str] = []
    unknown: list[str] = []
    wrong: list[str] = []
    for number, part in enumerate(parts, start=1):
        for key, value in _leaves(part.values, known):
            place, quoted = part.place(key), part.quote(key, value)
            if key in known:
                replaced = any(key in later.values for later in parts[number:])
                if not replaced and (problem := _problem(part, key, value, known[key])):
                    (wrong if "." in key else at_top).append(place + problem)
            elif inside := _inside(key, known):
                # without those of the items of lists
                names = [name.removeprefix(f"{key}.") for name in inside if "[]" not in name]
                names = ", ".join(names)
                wrong.append(f"{place}{quoted} must be a section, with values of {names}")
            else:
                unknown.append(place + refuse(key, known, others, part.name(key, sections)))
    if problems := at_top or unknown or wrong:
        raise ConfigError("\n".join(problems))


def _problem(part: _Part, key: str, value: Any, setting: Setting) -> str | None:
    """Why a setting cannot have this value; None if it can."""
    try:
        convert(setting.type, value)
    except MismatchError as error:
        if str(error):
            return f"{part.quote(key, value)} {error}"
        must = f"{part.quote(key, value)} must be {setting.kind}"
        if isinstance(value, float) and value.is_integer() and "whole number" in must:
            must += ", without e or point" + ("" if part.source else f": {value:.0f}")
        elif setting.kind.startswith("text") and isinstance(value, (bool, int, float)):
            must += ": put it in quotes"
            if not part.source:
                must += f""", {key}='"{written(value)}"'"""
        return must
    return None


def _leaves(
    values: Mapping[str, Any], known: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Key and value of all that is set; what is in a list comes before the list."""
    for name, value in values.items():
        # a name with dots or brackets must not pass for the key of a setting
        key = prefix + (name if _NAME.fullmatch(name) else repr(name))
        is_section = isinstance(value, dict) and key not in known
        if is_section and (value or _inside(key, known)) and prefix.count(".") < _DEEPEST:
            yield from _leaves(value, known, f"{key}.")
            continue
        items = value if isinstance(value, list) and _inside(f"{key}[]", known) else ()
        for item in items:
            if isinstance(item, dict):
                yield from _leaves(item, known, f"{key}[].")
        yield key, value


def _inside(section: str, known: Collection[str]) -> list[str]:
    """The settings of a section; none if it is not one."""
    return [key for key in known if key.startswith(f"{section}.")]


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def _read_yaml(path: Path) -> _Part:
    try:
        return _part_of(plain_yaml.load(path), str(path))
    except plain_yaml.YamlError as error:
        raise ConfigError(
            f"{path} must be a YAML file, and cannot be read as one: {error}"
        ) from error


def _part_of(document: plain_yaml.Document, source: str) -> _Part:
    values = {} if document.values is None else document.values
    if not isinstance(values, dict):
        what = "a list" if isinstance(values, list) else "a single value"
        raise ConfigError(
            f"{source} must map model, data, optim and run to their values, and holds {what}: see "
            "configs/quickstart.yaml"
        )
    return _Part(values, source, document.lines)


def to_yaml(config: Any) -> str:
    """The whole configuration as YAML, which `read_config` and `from_yaml` read back."""
    return plain_yaml.dump(asdict(config))

"""Configuration reader for any schema, which is a frozen dataclass of dataclasses.

Later sources override earlier ones:

    defaults <- values from the data <- the YAML file <- key=value on the command line

Errors quote only values from the command line. Values from a file are named by key and line,
because the file may be untrusted, or a link to a private one.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any, TypeVar, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

from configs import plain_yaml
from configs.renamed import NEEDS_EARLIER, REMOVED_VALUES, in_words, with_current_settings
from configs.settings import Setting, format_value, settings_of
from configs.suggestions import unknown_key_message
from configs.types import MismatchError, convert

C = TypeVar("C")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")
_MAX_DEPTH = 4  # nested sections that are searched for unknown keys


class ConfigError(ValueError):
    """Error for an invalid configuration; the message names the field and the reason."""


@dataclass(frozen=True)
class _Part:
    """Values from one source: a file, or one override from the command line."""

    values: dict[str, Any]
    source: str = ""
    """Name of the file; empty for the command line."""
    lines: Mapping[str, int] | None = None

    def place(self, key: str) -> str:
        """Return the file and line where a key is set, as the start of an error message."""
        if not self.source:
            return ""
        line = (self.lines or {}).get(key)
        return f"{self.source}, line {line}: " if line else f"{self.source}: "

    def quote(self, key: str, value: Any) -> str:
        """Return the key, with its value if that may be printed."""
        return key if self.source else f"{key}={format_value(value)}"

    def name(self, key: str, sections: Collection[str]) -> str:
        """Return a key that is not a setting, or "this key" if it must not be printed.

        A key from a file may be printed only if it is in a section of the schema.
        """
        first, *others = key.replace("[]", "").split(".")
        is_public = first in sections and all(map(_NAME.fullmatch, others))
        return key if is_public or not self.source else "this key"


def read_config(schema: type[C], argv: Sequence[str]) -> C:
    """Read a configuration from a command line: a YAML file, then any number of key=value.

    Raises:
        ConfigError: the file is missing or unreadable, a key is unknown, or a value is invalid.
    """
    return _build_config(schema, _parse(argv))


def read_task_config(
    schemas: Mapping[str, type[C]], argv: Sequence[str], *, of_a_run: bool = False
) -> C:
    """Read a configuration from a command line as `read_config` does, in the schema of its `task`.

    A configuration without a task has the first schema. The file may be `of_a_run`, which may have
    settings that were removed since.

    Raises:
        ConfigError: as in `read_config`, or the task is unknown.
    """
    parts = _parse(argv, of_a_run=of_a_run)
    task_part = next((part for part in reversed(parts) if "task" in part.values), None)
    task = task_part.values["task"] if task_part else next(iter(schemas))
    if not isinstance(task, str) or task not in schemas:
        assert task_part is not None
        raise ConfigError(
            f"{task_part.place('task')}{task_part.quote('task', task)} must be one of "
            f"{', '.join(schemas)}: set it in {parts[0].source}"
        )
    others = {f"task={name}": settings_of(s) for name, s in schemas.items() if name != task}
    try:
        return _build_config(schemas[task], parts, others)
    except ConfigError as error:
        if task_part:
            raise
        raise ConfigError(
            f"{error} (assuming task={task}, because {parts[0].source} does not set task)"
        ) from error


def from_yaml(schema: type[C], text: str) -> C:
    """Read a configuration that `to_yaml` wrote; settings added since then get their defaults.

    Values that were renamed since then get their current names, as in all files.

    Raises:
        ConfigError: the text is not plain YAML, or a setting is unknown.
    """
    source = "the configuration of a run"
    try:
        document = plain_yaml.parse(text)
    except plain_yaml.YamlError as error:
        raise ConfigError(f"{source} is not plain YAML: {error}") from error
    return _build_config(schema, [_part_of(document, source)])


def from_record(schema: type[C], values: dict[str, Any], source: str) -> C:
    """Read a configuration that a run recorded with `dataclasses.asdict` in `source`.

    As `from_yaml`, but the run may have settings that were removed since.
    """
    return _build_config(schema, [_Part(with_current_settings(values, of_a_run=True), source)])


def _parse(argv: Sequence[str], *, of_a_run: bool = False) -> list[_Part]:
    """Parse the file and the overrides of a command line."""
    if not argv or ("=" in argv[0] and not Path(argv[0]).is_file()):
        raise ConfigError("name a configuration first: train.py configs/quickstart.yaml key=value")
    path = Path(argv[0])
    if not path.is_file():
        moved = (
            next(iter(sorted(Path("configs").rglob(escape(path.name)))), None)
            if path.name
            else None
        )
        raise ConfigError(f"{path} is not a file. Try {moved or 'one of configs/*'}.")
    parts = [_read_yaml(path, of_a_run)]
    for override in argv[1:]:
        key, equals, text = override.partition("=")
        if not equals or override.startswith(("-", "=")):
            options = ", or --help, --dry-run[=GPUS] or --print-config"
            raise ConfigError(
                f"{override!r} must be key=value, for example optim.lr=3e-4"
                f"{options if override.startswith('-') else ''}"
            )
        try:
            value = plain_yaml.parse(text).values
        except plain_yaml.YamlError as error:
            raise ConfigError(
                f"{override!r} must have YAML after the first '=': {error}"
            ) from error
        parts.append(_Part(_nested(key, value)))
    return parts


def _build_config(
    schema: type[C], parts: Sequence[_Part], others: Mapping[str, Collection[str]] | None = None
) -> C:
    """Merge the parts, of which later ones override earlier ones, into an instance of the schema.

    A schema may have a static method `from_data`. It receives all given values by key, and returns
    defaults by key that depend on the data they name.

    Args:
        schema: dataclass of dataclasses.
        parts: values by source.
        others: keys of other schemas, for suggestions.
    """
    known = settings_of(schema)
    _check(parts, known, others or {})
    given: dict[str, Any] = {}
    for part in parts:
        _override(given, part.values)
    leaves = [(key, value) for key, value in _leaves(given, known) if "[]" not in key]
    try:
        from_data = getattr(schema, "from_data", lambda given: {})
        derived = from_data({key: convert(known[key].type, value) for key, value in leaves})
        values: dict[str, Any] = {}
        for layer in (*(_nested(key, value) for key, value in derived.items()), given):
            _override(values, layer)
        # The values are plain and have the right types, so OmegaConf does not interpolate anything.
        config = OmegaConf.to_object(OmegaConf.merge(_structure(schema), values))
    except MissingMandatoryValue as error:
        key, source = error.full_key or "a setting", parts[0].source
        meaning = f". It is: {known[key].text}" if key in known else ""
        raise ConfigError(
            f"{key} has no value: set it in {source} or on the command line{meaning}"
        ) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    assert isinstance(config, schema)
    return config


def _override(values: dict[str, Any], by: Mapping[str, Any]) -> None:
    """Override nested values by others, in place. OmegaConf.merge takes a millisecond per part."""
    for name, value in by.items():
        if isinstance(value, dict):
            section = values.get(name)
            values[name] = section = dict(section) if isinstance(section, dict) else {}
            _override(section, value)
        else:
            values[name] = value


@cache
def _structure(schema: type) -> Any:
    """Structured config of a schema, with its sections; OmegaConf.merge copies it.

    Merging would otherwise make the sections that have no default, which is slow, and would report
    such a section as missing, not the setting in it.
    """
    keys = [key for key in settings_of(schema) if "." in key and "[]" not in key]
    sections = {key.partition(".")[0] for key in keys}
    return OmegaConf.merge(OmegaConf.structured(schema), {key: {} for key in sections})


def _check(
    parts: Sequence[_Part], known: Mapping[str, Setting], others: Mapping[str, Collection[str]]
) -> None:
    """Refuse unknown keys and values of a wrong type, in one error.

    It reports the first of these groups that is not empty: wrong top-level values that are not
    overridden, unknown keys, other wrong values. A wrong top-level value, such as the task, may
    mean that all keys belong to another schema.
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
            elif in_section := _keys_in_section(key, known):
                # Keys of list items are left out.
                names = [name.removeprefix(f"{key}.") for name in in_section if "[]" not in name]
                names = ", ".join(names)
                wrong.append(f"{place}{quoted} must be a section, with values of {names}")
            else:
                name = part.name(key, sections)
                unknown.append(place + unknown_key_message(key, known, others, name))
    if problems := at_top or unknown or wrong:
        raise ConfigError("\n".join(problems))


def _problem(part: _Part, key: str, value: Any, setting: Setting) -> str | None:
    """Return why a setting cannot have this value; None if it can."""
    try:
        convert(setting.type, value)
    except MismatchError as error:
        if str(error):
            return f"{part.quote(key, value)} {error}"
        must = f"{part.quote(key, value)} must be {setting.kind}"
        if isinstance(value, float) and value.is_integer() and "whole number" in must:
            must += ", without exponent or point" + ("" if part.source else f": {value:.0f}")
        elif get_origin(setting.type) is list:
            must += f". It is: {setting.text}"
        elif current := in_words(key, value):
            must += f": {value} is now called {current}"
        elif (key, value) in REMOVED_VALUES:
            must += f": {value} was removed; {NEEDS_EARLIER}"
        elif setting.kind.startswith("text") and isinstance(value, (bool, int, float)):
            must += ": put it in quotes"
            if not part.source:
                must += f""", {key}='"{format_value(value)}"'"""
        return must
    return None


def _leaves(
    values: Mapping[str, Any], known: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield each key that is set, with its value; keys of list items come before the list."""
    for name, value in values.items():
        # A name with dots or brackets must not be mistaken for the key of a setting.
        key = prefix + (name if _NAME.fullmatch(name) else repr(name))
        is_section = isinstance(value, dict) and key not in known
        has_keys = value or _keys_in_section(key, known)
        if is_section and has_keys and prefix.count(".") < _MAX_DEPTH:
            yield from _leaves(value, known, f"{key}.")
            continue
        items = value if isinstance(value, list) and _keys_in_section(f"{key}[]", known) else ()
        for item in items:
            if isinstance(item, dict):
                yield from _leaves(item, known, f"{key}[].")
        yield key, value


def _keys_in_section(section: str, known: Collection[str]) -> list[str]:
    """List the settings of a section; empty if there is no such section."""
    return [key for key in known if key.startswith(f"{section}.")]


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def _read_yaml(path: Path, of_a_run: bool) -> _Part:
    try:
        return _part_of(plain_yaml.load(path), str(path), of_a_run)
    except plain_yaml.YamlError as error:
        raise ConfigError(f"{path} must be a YAML file: {error}") from error


def _part_of(document: plain_yaml.Document, source: str, of_a_run: bool = False) -> _Part:
    values = {} if document.values is None else document.values
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else "a single value"
        raise ConfigError(
            f"{source} must map model, data, optim and run to their values, but contains {kind}: "
            "see configs/quickstart.yaml"
        )
    values = with_current_settings(values, of_a_run=of_a_run)
    return _Part(values, source, document.lines)


def to_yaml(config: Any) -> str:
    """Write the whole configuration as YAML that `read_config` and `from_yaml` read back."""
    return plain_yaml.dump(asdict(config))

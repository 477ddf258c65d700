"""The settings of a schema as help: by section, with what each is, must be and means."""

import argparse
import shutil
from dataclasses import MISSING, is_dataclass
from functools import partial
from typing import Any, get_type_hints

from configs.settings import Setting, settings_of, written

_KEY_COLUMNS = 32
_MOST_COLUMNS = 100  # longer lines are hard to read


def settings_help(schema: type, text: str, *, usage: str, config: Any = None) -> str:
    """`usage`, `text` and all settings, folded to the width of the terminal.

    Settings stand as key=value, with the values of `config`, an instance of the schema, or else
    their defaults.
    """
    width = min(shutil.get_terminal_size().columns - 2, _MOST_COLUMNS)
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        usage=usage,
        description=text,
        formatter_class=partial(form, max_help_position=_KEY_COLUMNS, width=width),
        add_help=False,
    )
    sections = {"": parser.add_argument_group("top level")}
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind):
            about = (kind.__doc__ or "").partition("\n")[0]
            sections[name] = parser.add_argument_group(name, about)
    for key, setting in settings_of(schema).items():
        section = key.partition(".")[0]
        shown, explanation = _explained(setting, config)
        # a positional argument, as its name has no dashes; nothing is ever parsed
        sections.get(section, sections[""]).add_argument(
            key, metavar=shown, help=explanation.replace("%", "%%")
        )
    return parser.format_help()


def _explained(setting: Setting, config: Any) -> tuple[str, str]:
    """A setting as key=value, and all that is to be said about it."""
    value = setting.default
    if config is not None and "[]" not in setting.key:
        value = config
        for name in setting.key.split("."):
            value = getattr(value, name)
    if value is MISSING:
        return setting.key, f"{setting.text} ({setting.kind}; must be set)"
    kind = setting.kind
    if value != setting.default and setting.default is not MISSING:
        kind += f"; default {written(setting.default)}"
    return f"{setting.key}={_short(value)}", f"{setting.text} ({kind})"


def _short(value: Any) -> str:
    items = isinstance(value, list) and value and not isinstance(value[0], str)
    return "[...]" if items else written(value)

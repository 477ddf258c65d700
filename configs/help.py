"""Help text for the settings of a schema: values, types and explanations, by section."""

import argparse
import shutil
from dataclasses import MISSING, is_dataclass
from functools import partial
from typing import Any, get_type_hints

from configs.settings import Setting, format_value, settings_of

_KEY_COLUMNS = 32
_MAX_COLUMNS = 100  # longer lines are hard to read


def settings_help(schema: type, text: str, *, usage: str, config: Any = None) -> str:
    """Format `usage`, `text` and all settings for the width of the terminal.

    Settings are listed as key=value. Values are those of `config`, an instance of the schema, or
    the defaults if it is None.
    """
    width = min(shutil.get_terminal_size().columns - 2, _MAX_COLUMNS)
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
        key_and_value, explanation = _describe(setting, config)
        # argparse takes this for a positional argument, but the parser never parses anything
        sections.get(section, sections[""]).add_argument(
            key, metavar=key_and_value, help=explanation.replace("%", "%%")
        )
    return parser.format_help()


def _describe(setting: Setting, config: Any) -> tuple[str, str]:
    """Return a setting as key=value, and its explanation with its type and default."""
    value = setting.default
    if config is not None and "[]" not in setting.key:
        value = config
        for name in setting.key.split("."):
            value = getattr(value, name)
    if value is MISSING:
        return setting.key, f"{setting.text} ({setting.kind}; must be set)"
    kind = setting.kind
    if value != setting.default and setting.default is not MISSING:
        kind += f"; default {format_value(setting.default)}"
    return f"{setting.key}={_short(value)}", f"{setting.text} ({kind})"


def _short(value: Any) -> str:
    has_items = isinstance(value, list) and value and not isinstance(value[0], str)
    return "[...]" if has_items else format_value(value)

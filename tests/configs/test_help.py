from dataclasses import dataclass, field
from typing import Literal

import pytest

from configs.help import settings_help


@dataclass(frozen=True, kw_only=True)
class Item:
    """Not a section."""

    steps: int
    """Steps of an item."""


@dataclass(frozen=True, kw_only=True)
class Inner:
    """An inner section."""

    size: int = 3
    """Metres, 100% of them."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Purpose of the section.

    And more that help leaves out.
    """

    path: str
    """A folder."""
    inner: Inner = field(default_factory=Inner)
    items: list[Item] = field(default_factory=list)
    """Several."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """All."""

    kind: Literal["a", "b"] = "a"
    """Which kind."""
    section: Section


DEFAULTS = """\
usage: it CONFIG

Train it.
  As it is.

top level:
  kind=a                Which kind. (a or b)

section:
  Purpose of the section.

  section.path          A folder. (text; must be set)
  section.inner.size=3  Metres, 100% of them. (a whole number)
  section.items=[]      Several. (a list)
  section.items[].steps
                        Steps of an item. (a whole number; must be set)
"""
TEXT = "Train it.\n  As it is."


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("configs.help._KEY_COLUMNS", 24)


def test_help_shows_defaults():
    assert settings_help(Schema, TEXT, usage="it CONFIG") == DEFAULTS


def test_help_shows_the_values_of_a_configuration():
    section = Section(path="there", inner=Inner(size=4), items=[Item(steps=2)])
    shown = settings_help(Schema, TEXT, usage="it CONFIG", config=Schema(kind="b", section=section))
    expected = DEFAULTS
    for before, now in (
        ("kind=a                Which kind. (a or b)",
         "kind=b                Which kind. (a or b; default a)"),
        ("path          A folder. (text; must be set)", "path=there    A folder. (text)"),
        ("size=3  Metres, 100% of them. (a whole number)",
         "size=4  Metres, 100% of them. (a whole number; default 3)"),
        ("items=[]      Several. (a list)", "items=[...]   Several. (a list; default [])"),
    ):  # fmt: skip
        expected = expected.replace(before, now)
    assert shown == expected


def test_line_width_follows_the_terminal_up_to_a_limit(monkeypatch):
    for columns, widest in ((50, 48), (400, 100)):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = settings_help(Schema, TEXT, usage="it").splitlines()
        assert max(map(len, lines)) <= widest

from dataclasses import MISSING, dataclass, field
from typing import Literal

from configs.settings import format_value, settings_of


@dataclass(frozen=True, kw_only=True)
class Base:
    size: int = 3
    """Metres."""
    name: str
    not_described: bool = False


@dataclass(frozen=True, kw_only=True)
class Inner(Base):
    """A section."""

    not_described: bool = True  # another default
    """Now it is,
    over two lines."""
    choice: Literal["a", "b"] | None = None
    """One of two."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    inner: Inner
    pair: tuple[float, float] = (0.9, 0.95)
    inners: list[Inner] = field(default_factory=list)
    """Several."""


def test_keys_types_defaults_and_docstrings():
    def inner(prefix):
        return [
            (f"{prefix}size", "a whole number", 3, "Metres.", int),
            (f"{prefix}name", "text", MISSING, "", str),
            (f"{prefix}not_described", "true or false", True, "Now it is, over two lines.", bool),
            (f"{prefix}choice", "a, b or null", None, "One of two.", Literal["a", "b"] | None),
        ]

    pair = ("pair", "a list of 2, each a number", (0.9, 0.95), "", tuple[float, float])
    inners = ("inners", "a list", [], "Several.", list[Inner])
    settings = settings_of(Schema)
    assert [(s.key, s.kind, s.default, s.text, s.type) for s in settings.values()] == [
        *(*inner("inner."), pair, inners),
        *inner("inners[]."),
    ]
    assert all(key == setting.key for key, setting in settings.items())


def test_format_value_matches_the_command_line():
    values = 1e-8, True, None, "a b", (0.9, 0.95), [{"a": 1}]
    assert [format_value(value) for value in values] == [
        "1e-08", "true", "null", "a b", "[0.9,0.95]", '[{"a":1}]'
    ]  # fmt: skip

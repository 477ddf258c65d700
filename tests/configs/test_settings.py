from dataclasses import MISSING, dataclass, field
from typing import Literal

from configs.settings import Setting, settings_of, written


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
            Setting(key=f"{prefix}size", kind="a whole number", default=3, text="Metres."),
            Setting(key=f"{prefix}name", kind="text", default=MISSING, text=""),
            Setting(
                key=f"{prefix}not_described",
                kind="true or false",
                default=True,
                text="Now it is, over two lines.",
            ),
            Setting(key=f"{prefix}choice", kind="a, b or null", default=None, text="One of two."),
        ]

    pair = Setting(key="pair", kind="a list of 2, each a number", default=(0.9, 0.95), text="")
    inners = Setting(key="inners", kind="a list", default=[], text="Several.")
    settings = settings_of(Schema)
    assert list(settings.values()) == [*inner("inner."), pair, inners, *inner("inners[].")]
    assert all(key == setting.key for key, setting in settings.items())


def test_values_as_on_the_command_line():
    assert [written(value) for value in (1e-8, True, None, "a b", (0.9, 0.95), [{"a": 1}])] == [
        "1e-08", "true", "null", "a b", "[0.9,0.95]", '[{"a":1}]'
    ]  # fmt: skip

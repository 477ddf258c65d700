"""Checks of settings, common to all configurations. Importing it does not load PyTorch."""

from typing import Any, Literal, get_args, get_origin, get_type_hints


def check_positive(config: Any, prefix: str, *names: str, most: int = 10**12) -> None:
    """Refuse fields of `config` that are below 1 or above `most`."""
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise ValueError(f"{prefix}.{name}={value} must be at least 1.")
        if value > most:
            raise ValueError(f"{prefix}.{name}={value} must be at most {most:,}.")


def check_choices(config: Any, prefix: str) -> None:
    """Refuse Literal fields of `config` whose value is not one of the choices."""
    for name, kind in get_type_hints(type(config)).items():
        choices, value = get_args(kind), getattr(config, name)
        if get_origin(kind) is Literal and value not in choices:
            raise ValueError(f"{prefix}.{name}={value!r} must be one of {', '.join(choices)}.")

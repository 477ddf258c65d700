"""Settings that earlier versions wrote into files, and what they are now."""

from typing import Any

KEYS = ("model.attention", "model.rope_scaling")
"""Settings with values that are now called otherwise."""
REMOVED = {
    "optim.orthogonalization": "newton_schulz",
    "optim.cautious_decay": False,
    "optim.z_loss": 0.0,
    "model.value_embedding_every": 0,
    "model.smear": False,
    "model.zero_init": False,
}
"""Removed settings, and the value at which each had no effect: any file may still have it."""
OF_WEIGHTS = frozenset({"model.value_embedding_every", "model.smear"})
"""Removed settings whose weights fit no current model."""
REMOVED_VALUES = (("model.mlp", "relu_squared"),)
"""Settings that still exist, and values of theirs that were removed."""
NEEDS_EARLIER = "a model that was trained with it needs an earlier version of Papilio"


def current_settings(key: str, value: Any) -> dict[str, Any]:
    """Return the current settings for an earlier value, by key; empty if the value is current."""
    if key == "model.attention" and value == "unfused":
        return {key: "eager"}
    if key == "model.rope_scaling" and type(value) in (int, float):  # the factor of "linear"
        return {key: "none" if value == 1 else "linear", "model.rope_factor": float(value)}
    return {}


def in_words(key: str, value: Any) -> str:
    """Return the current form of an earlier value, for a message; empty if the value is current."""
    settings = current_settings(key, value)
    if not settings:
        return ""
    others = [f"{name}={current}" for name, current in settings.items() if name != key]
    return " with ".join([str(settings[key]), *others])


def with_current_settings(values: dict[str, Any], *, of_a_run: bool = False) -> dict[str, Any]:
    """Return the values of a file, by section, with its earlier values replaced or left out.

    Removed settings that had an effect are left out only if the file is `of_a_run`: its model can
    still be used, although it cannot be trained in the same way. Those in OF_WEIGHTS stay, so that
    they are refused.
    """
    for key in KEYS:
        section, _, name = key.rpartition(".")
        settings = values.get(section)
        if isinstance(settings, dict) and name in settings:
            current = current_settings(key, settings[name])
            renamed = {k.removeprefix(f"{section}."): v for k, v in current.items()}
            values = values | {section: settings | renamed}
    had_effect = removed_settings(values)
    for key in REMOVED:
        section, _, name = key.rpartition(".")
        settings = values.get(section)
        needed = key in had_effect and not (of_a_run and key not in OF_WEIGHTS)
        if isinstance(settings, dict) and name in settings and not needed:
            values = values | {section: {k: v for k, v in settings.items() if k != name}}
    return values


def removed_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return the removed settings that have an effect in the values of a file, by key."""
    found = {}
    for key, without_effect in REMOVED.items():
        section, _, name = key.rpartition(".")
        settings = values.get(section)
        if isinstance(settings, dict) and settings.get(name, without_effect) != without_effect:
            found[key] = settings[name]
    return found

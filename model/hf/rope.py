"""Settings of rotary positions in config.json, in transformers 5's format and in the older one."""

import math
from collections.abc import Mapping
from typing import Any

from model.config import DEFAULT_ROPE_BASE, ModelConfig
from model.hf.layout import config_error, read_number, read_size
from model.yarn import FAST_TURNS, SLOW_TURNS, yarn_magnitude

_OWNER = "rotary positions"
_KINDS = {"default": "none", "linear": "linear", "yarn": "yarn"}
"""model.rope_scaling by transformers' rope_type. Its "dynamic" follows the length of each text."""
_YARN_DEFAULTS = {
    **{"beta_fast": FAST_TURNS, "beta_slow": SLOW_TURNS, "truncate": True},
    **{"mscale": None, "mscale_all_dim": None},
}


def read_rope(
    hf: Mapping[str, Any], *, base: str, share: str, default_share: float
) -> dict[str, Any]:
    """Read `rope_base`, `rope_scaling` and `rope_factor` of a ModelConfig from config.json.

    Args:
        hf: contents of config.json.
        base: name of the base in the older format.
        share: name of the rotated share of a head in the older format.
        default_share: transformers' default for that share.

    Raises:
        ValueError: the positions are not those of a whole head, or are scaled in another way.
    """
    # transformers prefers the older name in the same order
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise config_error("rope_parameters", rope, ", which must be an object.")
    rotated = rope.get("partial_rotary_factor", hf.get(share, default_share))
    if rotated != 1:
        why = f", and this model rotates whole heads: only {share}=1 can be imported."
        raise config_error(share, rotated, why)
    if any(isinstance(value, Mapping) for value in rope.values()):
        why = ", and in this model all layers have the same rotary positions."
        raise config_error("rope_parameters", dict(rope), why)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _KINDS:
        why = f", and this model can only scale positions as {', '.join(map(repr, _KINDS))}."
        raise config_error("rope_type", kind, why)
    theta = rope.get("rope_theta", hf.get(base, DEFAULT_ROPE_BASE))
    settings = {"rope_base": read_number("rope_theta", theta, _OWNER)}
    factor = read_number("factor", rope.get("factor"), _OWNER) if _KINDS[kind] != "none" else 1.0
    if kind == "yarn":
        _check_yarn(rope, read_size(hf, "max_position_embeddings"), factor)
    # A factor of 1 scales nothing.
    scaling = _KINDS[kind] if factor != 1 else "none"
    return settings | {"rope_scaling": scaling, "rope_factor": factor}


def _check_yarn(rope: Mapping[str, Any], context_length: int, factor: float) -> None:
    """Check that YaRN's settings are those of `rope_tables`."""
    for name, default in _YARN_DEFAULTS.items():
        if rope.get(name, default) not in (None, default):
            raise config_error(name, rope[name], f", and this model can only have {default}.")
    magnitude = rope.get("attention_factor")
    if magnitude is not None and not math.isclose(magnitude, yarn_magnitude(factor), rel_tol=1e-6):
        why = f", and this model multiplies by {yarn_magnitude(factor):.6g} at factor={factor:g}."
        raise config_error("attention_factor", magnitude, why)
    trained = rope.get("original_max_position_embeddings", context_length)
    if trained != round(context_length / factor):
        why = (
            f", and this model needs {round(context_length / factor)}, max_position_embeddings="
            f"{context_length} over factor={factor:g}: correct one of the three."
        )
        raise config_error("original_max_position_embeddings", trained, why)


def write_rope(config: ModelConfig, *, base: str, share: str) -> dict[str, Any]:
    """Write the settings that `read_rope` reads, in both formats; ntk is a larger base."""
    kind: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling in ("linear", "yarn"):
        kind = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "yarn":
        trained = round(config.context_length / config.rope_factor)
        kind["original_max_position_embeddings"] = trained
    theta = config.scaled_rope_base
    return {
        share: 1.0,
        base: theta,
        "rope_scaling": {"type": kind["rope_type"], **kind} if len(kind) > 1 else None,
        "rope_parameters": {"rope_theta": theta, "partial_rotary_factor": 1.0, **kind},
    }

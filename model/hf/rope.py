"""Settings of rotary positions in config.json, in transformers 5's format and in the older one."""

from collections.abc import Mapping
from typing import Any

from model.config import DEFAULT_ROPE_BASE, ModelConfig
from model.hf.layout import config_error, read_number

_OWNER = "rotary positions"


def read_rope(
    hf: Mapping[str, Any], *, base: str, share: str, default_share: float
) -> dict[str, Any]:
    """Read `rope_base` and `rope_scaling` of a ModelConfig from config.json.

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
    if kind not in ("default", "linear"):
        why = ", and this model can only scale positions by one factor ('default' and 'linear')."
        raise config_error("rope_type", kind, why)
    theta = rope.get("rope_theta", hf.get(base, DEFAULT_ROPE_BASE))
    factor = read_number("factor", rope.get("factor"), _OWNER) if kind == "linear" else 1.0
    return {"rope_base": read_number("rope_theta", theta, _OWNER), "rope_scaling": factor}


def write_rope(config: ModelConfig, *, base: str, share: str) -> dict[str, Any]:
    """Write the settings that `read_rope` reads, in both formats."""
    scaled = config.rope_scaling != 1.0
    kind: dict[str, Any] = {"rope_type": "linear", "factor": config.rope_scaling}
    kind = kind if scaled else {"rope_type": "default"}
    return {
        share: 1.0,
        base: config.rope_base,
        "rope_scaling": {"type": "linear", **kind} if scaled else None,
        "rope_parameters": {"rope_theta": config.rope_base, "partial_rotary_factor": 1.0, **kind},
    }

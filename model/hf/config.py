"""Convert configurations from and to transformers' config.json. Does not import PyTorch.

The transformers model is a GPT2LMHeadModel for learned positions. For rotary ones it is a
GPTNeoXForCausalLM, or with RMSNorm or SwiGLU a LlamaForCausalLM or a Qwen3ForCausalLM.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from model.config import ModelConfig
from model.hf.gpt2 import GPT2
from model.hf.gpt_neox import GPT_NEOX
from model.hf.layout import ALWAYS_EXPORTABLE, Layout, config_error, read_number, read_size
from model.hf.llama import LLAMA, QWEN3

if TYPE_CHECKING:
    import torch

LAYOUTS = {layout.model_type: layout for layout in (GPT2, GPT_NEOX, LLAMA, QWEN3)}


def layout_for(config: ModelConfig) -> Layout:
    """Return the transformers model that a model is exported as, if it can be exported."""
    if config.norm == "rms_norm" or config.mlp == "swiglu":
        # Only Qwen3 has windows, and a width that is not a multiple of the heads. It always
        # normalises queries and keys.
        only_qwen3 = config.window_size is not None or config.n_embd % config.n_head != 0
        return QWEN3 if config.qk_norm or only_qwen3 else LLAMA
    return GPT_NEOX if config.positions == "rotary" else GPT2


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Build the configuration of the model that a config.json describes.

    Args:
        hf: contents of config.json. The sizes are required; other settings have transformers'
            defaults. Settings that do not affect the model in evaluation are ignored.

    Raises:
        ValueError: a value is missing, has the wrong type, or describes a model that Papilio does
            not implement.
    """
    kind = hf.get("model_type", GPT2.model_type)
    if not isinstance(kind, str) or kind not in LAYOUTS:
        only = " or ".join(map(repr, LAYOUTS))
        why = f", and this model can only be {only}: no other can be imported."
        raise config_error("model_type", kind, why)
    layout = LAYOUTS[kind]
    for name, choice in layout.choices.items():
        value = hf.get(name, choice.default)
        if value not in choice.allowed:
            only = " or ".join(map(repr, choice.allowed))
            why = f", and this model can only be {only}: no other {layout.name} can be imported."
            raise config_error(name, value, why)
    sizes: dict[str, Any] = {name: read_size(hf, hf_name) for hf_name, name in layout.sizes.items()}
    rates = {name: _rate(hf, name, layout.default_rate) for name in layout.dropout}
    if len(set(rates.values())) > 1:
        raise ValueError(
            f"config.json has {' and '.join(f'{name}={rate}' for name, rate in rates.items())}, "
            "and this model has one rate for both: give them the same value, which affects only "
            "training."
        )
    config = ModelConfig(
        **layout.fixed,
        **sizes,
        dropout=next(iter(rates.values()), 0.0),
        attention_dropout=_rate(hf, layout.attention_dropout, layout.default_rate),
        **layout.read(hf),
    )
    return replace(config, **_width_and_eps(hf, config, layout))


def _width_and_eps(hf: Mapping[str, Any], config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """Read the fields of ModelConfig that stay null if they have the default of `config`."""
    changes: dict[str, Any] = {}
    if layout.width_default is not None or hf.get(layout.width) is not None:
        n_inner = read_size(hf, layout.width, layout.width_default)
        changes |= {"n_inner": n_inner} if n_inner != config.mlp_width else {}
    default_eps = config.eps(config.norm)
    eps = read_number(layout.eps, hf.get(layout.eps, default_eps), "the normalisations")
    return changes | ({"norm_eps": eps} if eps != default_eps else {})


def config_to_hf(config: ModelConfig, *, eot_id: int, dtype: "torch.dtype") -> dict[str, Any]:
    """Build the contents of config.json for `layout_for(config)`.

    Args:
        config: the model.
        eot_id: id of the token that ends, and in GPT-2 also starts, a document.
        dtype: dtype of the exported tensors.

    Raises:
        ValueError: transformers does not have an equivalent model.
    """
    check_exportable(config)
    layout = layout_for(config)
    return {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        **{name: choice.allowed[0] for name, choice in layout.choices.items()},
        **{hf_name: getattr(config, name) for hf_name, name in layout.sizes.items()},
        layout.width: config.mlp_width,
        layout.eps: config.eps(config.norm),
        **dict.fromkeys(layout.dropout, config.dropout),
        layout.attention_dropout: config.attention_dropout,
        **layout.write(config),
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def check_exportable(config: ModelConfig) -> None:
    """Refuse a model that its transformers counterpart cannot represent.

    Raises:
        ValueError: the message names the first field that prevents the export.
    """
    reason = unsupported_reason(config)
    if reason is not None:
        raise ValueError(reason)


def unsupported_reason(config: ModelConfig) -> str | None:
    """Return why transformers has no equivalent of a model, as a sentence; None if it has."""
    layout = layout_for(config)
    if config.mask.pattern != "dense":
        return (
            f"model.mask.pattern={config.mask.pattern} cannot be exported: Hugging Face's "
            f"{layout.name} has no block-sparse masks, and would give other results with these "
            "weights."
        )
    for field in fields(config):
        value, only = getattr(config, field.name), layout.fixed.get(field.name, field.default)
        if field.name not in ALWAYS_EXPORTABLE | layout.exportable and value != only:
            return (
                f"model.{field.name}={value!r} cannot be exported: Hugging Face's {layout.name} "
                f"only implements the equivalent of model.{field.name}={only!r}."
            )
    return None


def _rate(hf: Mapping[str, Any], name: str, default: float) -> float:
    value = hf.get(name, default)
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise config_error(name, value, ", which must be a rate such as 0.1.")
    return float(value)

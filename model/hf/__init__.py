"""Convert weights and configurations from and to Hugging Face's transformers.

The transformers model is a GPT2LMHeadModel for learned positions, or a GPTNeoXForCausalLM for
rotary ones. Models without a head, whose names lack the prefix, can also be imported. Imports are
exact. Exports round only if another dtype is requested.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.hf.gpt2 import GPT2
from model.hf.gpt_neox import GPT_NEOX
from model.hf.layout import ALWAYS_EXPORTABLE, Conversion, Layout, config_error

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Supported dtypes of a checkpoint. float32 represents every value of each exactly."""

LAYOUTS = {layout.model_type: layout for layout in (GPT2, GPT_NEOX)}
_MAX_NAMES = 12


def layout_for(config: ModelConfig) -> Layout:
    """Return the transformers model that a model is exported as."""
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
    sizes: dict[str, Any] = {name: _size(hf, hf_name) for hf_name, name in layout.sizes.items()}
    inner, width = hf.get(layout.width, layout.width_default), 4 * sizes["n_embd"]
    if inner is not None and inner != width:
        why = f", and this model's MLP is always 4 * n_embd={width} wide: no other can be imported."
        raise config_error(layout.width, inner, why)
    rates = {name: _rate(hf, name, layout.default_rate) for name in layout.dropout}
    if len(set(rates.values())) > 1:
        raise ValueError(
            f"config.json has {' and '.join(f'{name}={rate}' for name, rate in rates.items())}, "
            "and this model has one rate for both: give them the same value, which affects only "
            "training."
        )
    return ModelConfig(
        **sizes,
        dropout=next(iter(rates.values())),
        attention_dropout=_rate(hf, layout.attention_dropout, layout.default_rate),
        **layout.read(hf),
    )


def config_to_hf(config: ModelConfig, *, eot_id: int, dtype: torch.dtype) -> dict[str, Any]:
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
    layout = layout_for(config)
    if config.mask.pattern != "dense":
        raise ValueError(
            f"model.mask.pattern={config.mask.pattern} cannot be exported: Hugging Face's "
            f"{layout.name} attends to all earlier tokens, and would give other results with these "
            "weights."
        )
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in ALWAYS_EXPORTABLE | layout.exportable and value != field.default:
            raise ValueError(
                f"model.{field.name}={value!r} cannot be exported: Hugging Face's {layout.name} "
                f"only implements the equivalent of model.{field.name}={field.default!r}."
            )


def state_from_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Convert the state dict of transformers' model, with or without its head, for our `GPT`.

    Args:
        tensors: by name, with or without the prefix "transformer." or "gpt_neox.", float32,
            bfloat16 or float16. Mask buffers of older versions are skipped, and so is a head equal
            to the embedding.
        config: from `config_from_hf`.

    Returns:
        Contiguous float32 tensors for `load_state_dict`. Padding rows of the embedding are 0. The
        tensors may share memory with `tensors`.

    Raises:
        ValueError: tensors are missing, unexpected, duplicated, or of another shape or dtype, or
            the head is not tied to the embedding. The message names them.
    """
    layout = layout_for(config)
    parameters: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(layout.prefix)
        if short in parameters:
            raise ValueError(
                f"the checkpoint has both {layout.prefix}{short} and {short}: keep one."
            )
        if not layout.buffers.fullmatch(short):
            parameters[short] = tensor
    heads = {name: parameters.pop(name) for name in layout.heads if name in parameters}
    conversions = {c.hf_name: c for c in layout.conversions(config)}
    _check_tensors(parameters, conversions, layout.name)
    embedding = parameters[layout.embedding]
    for name, head in heads.items():
        if not torch.equal(head, embedding):
            raise ValueError(
                f"{name} is not equal to {layout.prefix}{layout.embedding}, and this model has one "
                "table for both: only checkpoints with a tied head can be imported."
            )
    state = {}
    for hf_name, tensor in parameters.items():
        conversion = conversions[hf_name]
        if not tensor.isfinite().all():
            raise ValueError(
                f"{hf_name} of the checkpoint has values that are not finite: download it again."
            )
        state[conversion.name] = conversion.from_hf(tensor).float().contiguous()
    padded = torch.zeros(config.padded_vocab_size, config.n_embd)
    padded[: config.vocab_size] = embedding
    state["tok_emb.weight"] = padded
    return state


def state_to_hf(
    state: Mapping[str, Tensor], config: ModelConfig, *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Convert the state dict of our `GPT` for transformers' model; inverse of `state_from_hf`.

    If the model does not have biases, they are exported as 0.

    Args:
        state: `GPT.state_dict()`, float32.
        config: configuration of that model.
        dtype: dtype of the result; one of `DTYPES`.

    Returns:
        Contiguous tensors, without vocabulary padding and without the head, which is tied. They may
        share memory with `state`.

    Raises:
        ValueError: transformers does not have an equivalent model, or a weight is not finite, or
            too large for `dtype`.
    """
    check_exportable(config)
    layout = layout_for(config)
    conversions = layout.conversions(config)
    absent = {c.name for c in conversions if c.name.endswith(".bias") and not config.bias}
    assert state.keys() == {c.name for c in conversions} - absent
    tensors = {}
    for conversion in conversions:
        name, hf_name = conversion.name, layout.prefix + conversion.hf_name
        if name in absent:
            tensors[hf_name] = torch.zeros(conversion.hf_shape, dtype=dtype)
            continue
        tensor = state[name]
        if name == "tok_emb.weight":
            tensor = tensor[: config.vocab_size]
        if not tensor.isfinite().all():
            raise ValueError(
                f"{name} has values that are not finite: the model is broken, export an older "
                "checkpoint."
            )
        converted = conversion.to_hf(tensor).to(dtype).contiguous()
        if converted.isinf().any():
            raise ValueError(
                f"{name} reaches {tensor.abs().max():.4g}, and {dtype} ends at "
                f"{torch.finfo(dtype).max:.4g}: choose a wider dtype."
            )
        tensors[hf_name] = converted
    return tensors


def _check_tensors(
    tensors: Mapping[str, Tensor], conversions: Mapping[str, Conversion], model: str
) -> None:
    """Refuse tensors whose names, shapes or dtypes are not those of the model."""
    missing = sorted(conversions.keys() - tensors)
    unexpected = sorted(tensors.keys() - conversions)
    problems = [f"lacks {_listing(missing)}"] if missing else []
    if unexpected:
        problems.append(f"has {_listing(unexpected)}, which {model} does not have")
    if problems:
        raise ValueError(
            f"the checkpoint {' and '.join(problems)}: config.json and the weights must be those "
            f"of one {model}."
        )
    shapes = [
        f"{name} is {tuple(tensor.shape)} and not {conversions[name].hf_shape}"
        for name, tensor in tensors.items()
        if tuple(tensor.shape) != conversions[name].hf_shape
    ]
    if shapes:
        raise ValueError(
            f"the checkpoint does not have the shapes of its config.json: {_listing(shapes)}."
        )
    dtypes = [
        f"{name} is {tensor.dtype}"
        for name, tensor in tensors.items()
        if tensor.dtype not in DTYPES.values()
    ]
    if dtypes:
        raise ValueError(
            f"the tensors must be {', '.join(DTYPES)}, which float32 represents exactly: "
            f"{_listing(dtypes)}."
        )


def _listing(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _size(hf: Mapping[str, Any], name: str) -> int:
    value = hf.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        why = ", which must be a whole number: the sizes of a model cannot be guessed."
        raise config_error(name, value, why)
    return value


def _rate(hf: Mapping[str, Any], name: str, default: float) -> float:
    value = hf.get(name, default)
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise config_error(name, value, ", which must be a rate such as 0.1.")
    return float(value)

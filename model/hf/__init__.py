"""Weights in and out: our state and configuration against those of Hugging Face's transformers.

The other side is a state dict and the config.json of GPT2LMHeadModel, for learned positions, or of
GPTNeoXForCausalLM, for rotary ones; or of the same model without its head, whose names lack the
prefix. Nothing is rounded on the way in, and on the way out only where another dtype is asked for.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.hf.gpt2 import GPT2
from model.hf.gpt_neox import GPT_NEOX
from model.hf.layout import ANYWHERE, Layout, Pair, config_error

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Of the tensors in a checkpoint; float32 holds every value of each."""

LAYOUTS = {layout.model_type: layout for layout in (GPT2, GPT_NEOX)}
_MAX_NAMES = 12


def layout_for(config: ModelConfig) -> Layout:
    """The model of transformers that a model of ours is written as."""
    return GPT_NEOX if config.positions == "rotary" else GPT2


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes.

    Args:
        hf: the contents of config.json. The sizes must be there; for the rest, transformers'
            defaults hold. What changes no number of the model in evaluation is not looked at.

    Raises:
        ValueError: a value is missing or of the wrong type, or describes a model that ours is not.
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
    sizes: dict[str, Any] = {ours: _size(hf, theirs) for theirs, ours in layout.sizes.items()}
    inner, width = hf.get(layout.width, layout.width_default), 4 * sizes["n_embd"]
    if inner is not None and inner != width:
        why = f", and this model's MLP is always 4 * n_embd={width} wide: no other can be imported."
        raise config_error(layout.width, inner, why)
    rates = {name: _rate(hf, name, layout.default_rate) for name in layout.dropout}
    if len(set(rates.values())) > 1:
        raise ValueError(
            f"config.json has {' and '.join(f'{name}={rate}' for name, rate in rates.items())}, "
            ", and this model has one rate for both: give them one value there, which changes "
            "training alone."
        )
    return ModelConfig(
        **sizes,
        dropout=next(iter(rates.values())),
        attention_dropout=_rate(hf, layout.attention_dropout, layout.default_rate),
        **layout.read(hf),
    )


def config_to_hf(config: ModelConfig, *, eot_id: int, dtype: torch.dtype) -> dict[str, Any]:
    """The contents of config.json for `layout_for(config)`.

    Args:
        config: the model.
        eot_id: id of the token that ends, and in GPT-2 also starts, a document.
        dtype: of the tensors that lie beside it.

    Raises:
        ValueError: transformers has no model that computes what this one does.
    """
    check_expressible(config)
    layout = layout_for(config)
    return {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        **{name: choice.allowed[0] for name, choice in layout.choices.items()},
        **{theirs: getattr(config, ours) for theirs, ours in layout.sizes.items()},
        layout.width: config.mlp_width,
        **dict.fromkeys(layout.dropout, config.dropout),
        layout.attention_dropout: config.attention_dropout,
        **layout.write(config),
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def check_expressible(config: ModelConfig) -> None:
    """Refuse a model that transformers' model for it cannot compute.

    Raises:
        ValueError: names the first field that stands in the way.
    """
    layout = layout_for(config)
    if config.mask.pattern != "dense":
        raise ValueError(
            f"model.mask.pattern={config.mask.pattern} cannot be exported: Hugging Face's "
            f"{layout.name} attends to every token before, and would compute something else from "
            "these weights."
        )
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in ANYWHERE | layout.free and value != field.default:
            raise ValueError(
                f"model.{field.name}={value!r} cannot be exported: Hugging Face's {layout.name} "
                f"has only what model.{field.name}={field.default!r} means here."
            )


def state_from_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The state of our `GPT` from that of transformers' model, with or without its head.

    Args:
        tensors: by name, with or without the prefix "transformer." or "gpt_neox.", float32,
            bfloat16 or float16. Mask buffers of older versions are skipped, and so is a head equal
            to the embedding.
        config: from `config_from_hf`.

    Returns:
        float32, contiguous, for `load_state_dict`; padded rows of the embedding are 0. They may
        share memory with `tensors`.

    Raises:
        ValueError: names tensors that are missing, unexpected, of another shape or dtype, or there
            twice; or the head is not the embedding.
    """
    layout = layout_for(config)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(layout.prefix)
        if short in found:
            raise ValueError(
                f"the checkpoint has both {layout.prefix}{short} and {short}: keep one."
            )
        if not layout.buffers.fullmatch(short):
            found[short] = tensor
    heads = {name: found.pop(name) for name in layout.heads if name in found}
    pairs = {pair.theirs: pair for pair in layout.pairs(config)}
    _check_tensors(found, pairs, layout.name)
    embedding = found[layout.embedding]
    for name, head in heads.items():
        if not torch.equal(head, embedding):
            raise ValueError(
                f"{name} is not equal to {layout.prefix}{layout.embedding}, and this model has one "
                "table for both: only checkpoints with a tied head can be imported."
            )
    state = {}
    for theirs, tensor in found.items():
        pair = pairs[theirs]
        if not tensor.isfinite().all():
            raise ValueError(
                f"{theirs} of the checkpoint has values that are not finite: get it again."
            )
        state[pair.ours] = pair.to_ours(tensor).float().contiguous()
    padded = torch.zeros(config.padded_vocab_size, config.n_embd)
    padded[: config.vocab_size] = embedding
    state["tok_emb.weight"] = padded
    return state


def state_to_hf(
    state: Mapping[str, Tensor], config: ModelConfig, *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The state of transformers' model from that of our `GPT`; the inverse of `state_from_hf`.

    Biases that a model does not have are 0 there.

    Args:
        state: `GPT.state_dict()`, float32.
        config: of that model.
        dtype: of the result; one of `DTYPES`.

    Returns:
        Contiguous tensors, without vocabulary padding and, as it is tied, without the head. They
        may share memory with `state`.

    Raises:
        ValueError: transformers has no model that computes what this one does, or a weight is not
            finite, or too large for `dtype`.
    """
    check_expressible(config)
    layout = layout_for(config)
    pairs = layout.pairs(config)
    absent = {p.ours for p in pairs if p.ours.endswith(".bias") and not config.bias}
    assert state.keys() == {pair.ours for pair in pairs} - absent
    tensors = {}
    for pair in pairs:
        if pair.ours in absent:
            tensors[layout.prefix + pair.theirs] = torch.zeros(pair.shape, dtype=dtype)
            continue
        tensor = state[pair.ours]
        if pair.ours == "tok_emb.weight":
            tensor = tensor[: config.vocab_size]
        if not tensor.isfinite().all():
            raise ValueError(
                f"{pair.ours} has values that are not finite: the model is broken, export an older "
                "checkpoint."
            )
        converted = pair.to_theirs(tensor).to(dtype).contiguous()
        if converted.isinf().any():
            raise ValueError(
                f"{pair.ours} reaches {tensor.abs().max():.4g}, and {dtype} ends at "
                f"{torch.finfo(dtype).max:.4g}: choose a wider dtype."
            )
        tensors[layout.prefix + pair.theirs] = converted
    return tensors


def _check_tensors(found: Mapping[str, Tensor], pairs: Mapping[str, Pair], model: str) -> None:
    """Refuse what does not have the names, shapes and dtypes of such a model."""
    missing, unexpected = sorted(pairs.keys() - found), sorted(found.keys() - pairs)
    problems = [f"lacks {_listing(missing)}"] if missing else []
    if unexpected:
        problems.append(f"has {_listing(unexpected)}, which {model} does not have")
    if problems:
        raise ValueError(
            f"the checkpoint {' and '.join(problems)}: config.json and the weights must be those "
            f"of one {model}."
        )
    shapes = [
        f"{name} is {tuple(tensor.shape)} and not {pairs[name].shape}"
        for name, tensor in found.items()
        if tuple(tensor.shape) != pairs[name].shape
    ]
    if shapes:
        raise ValueError(
            f"the checkpoint does not have the shapes of its config.json: {_listing(shapes)}."
        )
    dtypes = [
        f"{name} is {tensor.dtype}"
        for name, tensor in found.items()
        if tensor.dtype not in DTYPES.values()
    ]
    if dtypes:
        raise ValueError(
            f"the checkpoint must be in {', '.join(DTYPES)}, which float32 can hold exactly: "
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

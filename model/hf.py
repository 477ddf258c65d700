"""GPT-2 weights in and out: our state and configuration against those of Hugging Face's GPT-2.

The other side is the state dict and the config.json of transformers' GPT2LMHeadModel (or GPT2Model,
whose names lack the prefix). Its Conv1D stores a weight as (in, out), torch's Linear as (out, in).
Nothing is rounded on the way in, and on the way out only where another dtype is asked for.
Shapes: C n_embd, V vocab_size, T context_length.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.config import ModelConfig

PREFIX = "transformer."
HEAD = "lm_head.weight"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Of the tensors in a checkpoint; float32 holds every value of each."""

# Buffers that older versions saved: the causal mask, and what hidden scores were set to.
_BUFFER = re.compile(r"h\.\d+\.attn\.(masked_)?bias")

# What the model can be, the first value being what transformers takes where there is none.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "layer_norm_epsilon": (1e-5,),  # torch's default
    "scale_attn_weights": (True,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
_SIZES = {
    "vocab_size": "vocab_size",
    "n_positions": "context_length",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
}
"""Whole numbers of a config.json, and the fields of ModelConfig that they are."""

# Fields of ModelConfig that may have any value in an export; all others must have their default.
_FREE = {
    *_SIZES.values(),
    *("dropout", "attention_dropout", "scale_attn_by_inverse_layer_idx"),  # config.json says them
    *("positions", "mask"),  # `check_expressible` looks at them
    "bias",  # one of 0 is none
    *("vocab_multiple", "attention", "residual_in_fp32", "recompute_gelu"),  # at most rounding
}
_MAX_NAMES = 12


class _Pair(NamedTuple):
    """One parameter on both sides."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    """Of theirs."""
    transposed: bool = False


# ours, theirs, and the shape of their weight in units of C: two sides are those of a Conv1D
_BLOCK = (
    ("ln_1", "ln_1", (1,)),
    ("attn.qkv_proj", "attn.c_attn", (1, 3)),
    ("attn.out_proj", "attn.c_proj", (1, 1)),
    ("ln_2", "ln_2", (1,)),
    ("mlp.fc_in", "mlp.c_fc", (1, 4)),
    ("mlp.fc_out", "mlp.c_proj", (4, 1)),
)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes.

    Args:
        hf: the contents of config.json. The sizes must be there; for the rest, transformers'
            defaults hold. What changes no number of the model in evaluation is not looked at.

    Raises:
        ValueError: a value is missing or of the wrong type, or describes a model that ours is not.
    """
    for name, choices in _CHOICES.items():
        value = hf.get(name, choices[0])
        if value not in choices:
            raise ValueError(
                f"config.json has {name}={value!r}, and this model can only be "
                f"{' or '.join(map(repr, choices))}: no other GPT-2 can be imported."
            )
    sizes: dict[str, Any] = {ours: _size(hf, theirs) for theirs, ours in _SIZES.items()}
    inner, width = hf.get("n_inner"), 4 * sizes["n_embd"]
    if inner is not None and inner != width:
        raise ValueError(
            f"config.json has n_inner={inner!r}, and this model's MLP is always 4 * n_embd="
            f"{width} wide: no other GPT-2 can be imported."
        )
    embedding, residual = _rate(hf, "embd_pdrop"), _rate(hf, "resid_pdrop")
    if embedding != residual:
        raise ValueError(
            f"config.json has embd_pdrop={embedding} and resid_pdrop={residual}, and this model "
            "has one rate for both: give them one value there, which changes training alone."
        )
    scaled = hf.get("scale_attn_by_inverse_layer_idx", False)
    if not isinstance(scaled, bool):
        raise ValueError(
            f"config.json has scale_attn_by_inverse_layer_idx={scaled!r}, which must be true or "
            "false."
        )
    return ModelConfig(
        **sizes,
        dropout=embedding,
        attention_dropout=_rate(hf, "attn_pdrop"),
        scale_attn_by_inverse_layer_idx=scaled,
    )


def config_to_hf(config: ModelConfig, *, eot_id: int, dtype: torch.dtype) -> dict[str, Any]:
    """The contents of config.json for GPT2LMHeadModel.

    Args:
        config: the model.
        eot_id: id of the token that ends, and in GPT-2 also starts, a document.
        dtype: of the tensors that lie beside it.

    Raises:
        ValueError: GPT2LMHeadModel cannot compute what the model does.
    """
    check_expressible(config)
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{name: choices[0] for name, choices in _CHOICES.items()},
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "n_inner": None,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def check_expressible(config: ModelConfig) -> None:
    """Refuse a model that GPT2LMHeadModel cannot compute.

    Raises:
        ValueError: names the first field that stands in the way.
    """
    if config.positions == "rotary":
        raise ValueError(
            "model.positions=rotary cannot be exported: Hugging Face's GPT-2 has learned positions "
            "only, and would compute something else from these weights."
        )
    if config.mask.pattern != "dense":
        raise ValueError(
            f"model.mask.pattern={config.mask.pattern} cannot be exported: Hugging Face's GPT-2 "
            "attends to every token before, and would compute something else from these weights."
        )
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in _FREE and value != field.default:
            raise ValueError(
                f"model.{field.name}={value!r} cannot be exported: Hugging Face's GPT-2 has only "
                f"what model.{field.name}={field.default!r} means here."
            )


def state_from_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The state of our `GPT` from that of GPT2LMHeadModel or GPT2Model.

    Args:
        tensors: by name, with or without the prefix "transformer.", float32, bfloat16 or float16.
            Mask buffers of older versions are skipped, and so is a head equal to the embedding.
        config: from `config_from_hf`.

    Returns:
        float32, contiguous, for `load_state_dict`; padded rows of the embedding are 0. They may
        share memory with `tensors`.

    Raises:
        ValueError: names tensors that are missing, unexpected, of another shape or dtype, or there
            twice; or the head is not the embedding.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(PREFIX)
        if short in found:
            raise ValueError(f"the checkpoint has both {PREFIX}{short} and {short}: keep one.")
        if not _BUFFER.fullmatch(short):
            found[short] = tensor
    head = found.pop(HEAD, None)
    pairs = {pair.theirs: pair for pair in _pairs(config)}
    _check_tensors(found, pairs)
    embedding = found["wte.weight"]
    if head is not None and not torch.equal(head, embedding):
        raise ValueError(
            f"{HEAD} is not equal to {PREFIX}wte.weight, and this model has one table for both: "
            "only checkpoints with a tied head can be imported."
        )
    state = {}
    for theirs, tensor in found.items():
        pair = pairs[theirs]
        state[pair.ours] = (tensor.T if pair.transposed else tensor).float().contiguous()
    padded = torch.zeros(config.padded_vocab_size, config.n_embd)
    padded[: config.vocab_size] = embedding
    state["tok_emb.weight"] = padded
    return state


def state_to_hf(
    state: Mapping[str, Tensor], config: ModelConfig, *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The state of GPT2LMHeadModel from that of our `GPT`; the inverse of `state_from_hf`.

    Biases that a model does not have are 0 there.

    Args:
        state: `GPT.state_dict()`, float32.
        config: of that model.
        dtype: of the result; one of `DTYPES`.

    Returns:
        Contiguous tensors, without vocabulary padding and, as it is tied, without the head. They
        may share memory with `state`.

    Raises:
        ValueError: GPT2LMHeadModel cannot compute what the model does, or a finite weight is too
            large for `dtype`.
    """
    check_expressible(config)
    pairs = _pairs(config)
    absent = {p.ours for p in pairs if p.ours.endswith(".bias") and not config.bias}
    assert state.keys() == {pair.ours for pair in pairs} - absent
    tensors = {}
    for pair in pairs:
        tensor = torch.zeros(pair.shape) if pair.ours in absent else state[pair.ours]
        if pair.ours == "tok_emb.weight":
            tensor = tensor[: config.vocab_size]
        converted = (tensor.T if pair.transposed else tensor).to(dtype).contiguous()
        if converted.isinf().sum() > tensor.isinf().sum():
            raise ValueError(
                f"{pair.ours} reaches {tensor.abs().max():.4g}, and {dtype} ends at "
                f"{torch.finfo(dtype).max:.4g}: choose a wider dtype."
            )
        tensors[PREFIX + pair.theirs] = converted
    return tensors


def _pairs(config: ModelConfig) -> list[_Pair]:
    C = config.n_embd
    pairs = [
        _Pair("tok_emb.weight", "wte.weight", (config.vocab_size, C)),
        _Pair("pos_emb.weight", "wpe.weight", (config.context_length, C)),
        _Pair("ln_f.weight", "ln_f.weight", (C,)),
        _Pair("ln_f.bias", "ln_f.bias", (C,)),
    ]
    for layer in range(config.n_layer):
        for name, other, sides in _BLOCK:
            ours, theirs = f"blocks.{layer}.{name}", f"h.{layer}.{other}"
            shape = tuple(side * C for side in sides)
            pairs += [
                _Pair(f"{ours}.weight", f"{theirs}.weight", shape, transposed=len(shape) == 2),
                _Pair(f"{ours}.bias", f"{theirs}.bias", shape[-1:]),
            ]
    return pairs


def _check_tensors(found: Mapping[str, Tensor], pairs: Mapping[str, _Pair]) -> None:
    """Refuse what does not have the names, shapes and dtypes of a GPT-2."""
    missing, unexpected = sorted(pairs.keys() - found), sorted(found.keys() - pairs)
    problems = [f"lacks {_listing(missing)}"] if missing else []
    if unexpected:
        problems.append(f"has {_listing(unexpected)}, which GPT-2 does not have")
    if problems:
        raise ValueError(
            f"the checkpoint {' and '.join(problems)}: config.json and the weights must be those "
            "of one GPT-2."
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
        raise ValueError(
            f"config.json has {name}={value!r}, which must be a whole number: the sizes of a "
            "GPT-2 cannot be guessed."
        )
    return value


def _rate(hf: Mapping[str, Any], name: str) -> float:
    value = hf.get(name, 0.1)  # transformers' default of all three
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"config.json has {name}={value!r}, which must be a rate such as 0.1.")
    return float(value)

"""Convert weights from and to the state dicts of transformers' models.

Models without a head, whose names lack the prefix, can also be imported. Imports are exact. Exports
round only if another dtype is requested. Shapes: C n_embd, H n_head, D head_dim, V vocab_size.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ModelConfig
from model.hf.config import check_exportable, layout_for
from model.hf.layout import Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Supported dtypes of a checkpoint. float32 represents every value of each exactly."""

_TABLES = {"tok_emb.weight", "out_emb.weight"}  # whose rows are padded
_MAX_NAMES = 12


def _unchanged(x: Tensor) -> Tensor:
    return x


def _regroup(x: Tensor, groups: tuple[int, int]) -> Tensor:
    """Reorder rows from (a, b, D) to (b, a, D)."""
    return x.unflatten(0, (*groups, -1)).transpose(0, 1).flatten(0, 2)


class Conversion(NamedTuple):
    """Conversion of one parameter of our model, which may be several of transformers' model."""

    name: str
    hf_shapes: Mapping[str, tuple[int, ...]]
    """Shapes of transformers' parameters by name, whose rows together are the converted ones."""
    to_hf: Callable[[Tensor], Tensor] = _unchanged
    from_hf: Callable[[Tensor], Tensor] = _unchanged


def conversions(layout: Layout, config: ModelConfig) -> Iterator[Conversion]:
    """Generate the conversions of all parameters of a model."""
    C, W = config.n_embd, config.mlp_width
    yield Conversion("tok_emb.weight", {layout.embedding: (config.vocab_size, C)})
    if not config.tie_embeddings:
        yield Conversion("out_emb.weight", {layout.heads[0]: (config.vocab_size, C)})
    if layout.positions is not None:
        yield Conversion("pos_emb.weight", {layout.positions: (config.context_length, C)})
    has_biases = config.bias or layout.always_biased
    norm_kinds = ("weight", "bias") if config.norm == "layer_norm" and has_biases else ("weight",)
    for kind in norm_kinds:
        yield Conversion(f"ln_f.{kind}", {f"{layout.norm}.{kind}": (C,)})
    queries, keys = config.attention_width, config.kv_heads * config.head_dim
    gates = W if config.mlp == "swiglu" else 0
    shapes = {
        **{"ln_1": (C,), "attn.qkv_proj": (queries + 2 * keys, C), "attn.out_proj": (C, queries)},
        **{"ln_2": (C,), "mlp.fc_in": (gates + W, C), "mlp.fc_out": (C, W)},
        **{"attn.q_norm": (config.head_dim,), "attn.k_norm": (config.head_dim,)},
    }
    rows = {"attn.qkv_proj": (queries, keys, keys), "mlp.fc_in": (gates, W)}
    regroup = (
        partial(_regroup, groups=(3, config.n_head)),
        partial(_regroup, groups=(config.n_head, 3)),
    )
    for index in range(config.n_layer):
        for layer, hf_layers in layout.block.items():
            shape = shapes[layer]
            is_linear = len(shape) == 2
            parts = rows[layer] if len(hf_layers) > 1 else shape[:1]
            for kind in ("weight", "bias") if is_linear and has_biases else norm_kinds:
                ends = shape[1:] if kind == "weight" else ()
                names = [f"{hf_layer.format(index)}.{kind}" for hf_layer in hf_layers]
                hf_shapes = {n: (part, *ends) for n, part in zip(names, parts, strict=True)}
                converters = ()
                if layout.by_head and layer == "attn.qkv_proj":
                    converters = regroup
                elif layout.transposed and ends:
                    hf_shapes = {name: size[::-1] for name, size in hf_shapes.items()}
                    converters = (Tensor.t, Tensor.t)
                yield Conversion(f"blocks.{index}.{layer}.{kind}", hf_shapes, *converters)


def state_from_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Convert the state dict of transformers' model, with or without its head, for our `GPT`.

    Args:
        tensors: by name, with or without the prefix such as "transformer." or "model.", float32,
            bfloat16 or float16. Buffers of older versions are skipped, and so is a head equal to
            the embedding.
        config: from `config_from_hf`.

    Returns:
        Contiguous float32 tensors for `load_state_dict`. Padding rows of the embedding are 0. The
        tensors may share memory with `tensors`.

    Raises:
        ValueError: tensors are missing, unexpected, duplicated, or of another shape or dtype, or
            a head that should be tied is not equal to the embedding. The message names them.
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
    tied = layout.heads if config.tie_embeddings else ()
    heads = {name: parameters.pop(name) for name in tied if name in parameters}
    converted = list(conversions(layout, config))
    shapes = {name: shape for c in converted for name, shape in c.hf_shapes.items()}
    _check_tensors(parameters, shapes, layout.name)
    embedding = parameters[layout.embedding]
    for name, head in heads.items():
        if not torch.equal(head, embedding):
            raise ValueError(
                f"{name} is not equal to {layout.prefix}{layout.embedding}, and this {layout.name} "
                "has one table for both: only checkpoints with a tied head can be imported."
            )
    for name, tensor in parameters.items():
        if not tensor.isfinite().all():
            raise ValueError(
                f"{name} of the checkpoint has values that are not finite: download it again."
            )
    state = {}
    for conversion in converted:
        parts = [parameters[name].float() for name in conversion.hf_shapes]
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        state[conversion.name] = conversion.from_hf(joined).contiguous()
    for name in _TABLES & state.keys():
        padded = torch.zeros(config.padded_vocab_size, config.n_embd)
        padded[: config.vocab_size] = state[name]
        state[name] = padded
    return state


def state_to_hf(
    state: Mapping[str, Tensor], config: ModelConfig, *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Convert the state dict of our `GPT` for transformers' model; inverse of `state_from_hf`.

    If the model does not have biases and transformers' model does, they are exported as 0.

    Args:
        state: `GPT.state_dict()`, float32.
        config: configuration of that model.
        dtype: dtype of the result; one of `DTYPES`.

    Returns:
        Contiguous tensors, without vocabulary padding and without a tied head. They may share
        memory with `state`.

    Raises:
        ValueError: transformers does not have an equivalent model, or a weight is not finite, or
            too large for `dtype`.
    """
    check_exportable(config)
    layout = layout_for(config)
    converted = list(conversions(layout, config))
    absent = {c.name for c in converted if c.name.endswith(".bias") and not config.bias}
    assert state.keys() == {c.name for c in converted} - absent
    tensors = {}
    for name, hf_shapes, to_hf, _ in converted:
        prefix = "" if name == "out_emb.weight" else layout.prefix
        hf_names = [prefix + hf_name for hf_name in hf_shapes]
        if name in absent:
            for hf_name, shape in zip(hf_names, hf_shapes.values(), strict=True):
                tensors[hf_name] = torch.zeros(shape, dtype=dtype)
            continue
        tensor = state[name]
        if name in _TABLES:
            tensor = tensor[: config.vocab_size]
        if not tensor.isfinite().all():
            raise ValueError(
                f"{name} has values that are not finite: the model is broken, export an older "
                "checkpoint."
            )
        rounded = to_hf(tensor).to(dtype)
        if rounded.isinf().any():
            raise ValueError(
                f"{name} reaches {tensor.abs().max():.4g}, and {dtype} ends at "
                f"{torch.finfo(dtype).max:.4g}: choose a wider dtype."
            )
        parts = rounded.split([shape[0] for shape in hf_shapes.values()])
        tensors |= {n: part.contiguous() for n, part in zip(hf_names, parts, strict=True)}
    return tensors


def _check_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], model: str
) -> None:
    """Refuse tensors whose names, shapes or dtypes are not those of the model."""
    missing = sorted(shapes.keys() - tensors)
    unexpected = sorted(tensors.keys() - shapes)
    problems = [f"lacks {_listing(missing)}"] if missing else []
    if unexpected:
        problems.append(f"has {_listing(unexpected)}, which {model} does not have")
    if problems:
        raise ValueError(
            f"the checkpoint {' and '.join(problems)}: config.json and the weights must be those "
            f"of one {model}."
        )
    misshapen = [
        f"{name} is {tuple(tensor.shape)} and not {shapes[name]}"
        for name, tensor in tensors.items()
        if tuple(tensor.shape) != shapes[name]
    ]
    if misshapen:
        raise ValueError(
            f"the checkpoint does not have the shapes of its config.json: {_listing(misshapen)}."
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

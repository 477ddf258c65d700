"""Approximations of attention from public packages: the peers of the paper's Figure 3.

Each contender runs the attention module of a package on given queries, keys and values. The linear
layers around it are replaced, so only attention is timed. Sizes of windows, features, landmarks and
buckets are the defaults of the package, except for Local, which has none. The packages are those of
`pip install '.[peers]'`. A function gets a case and a device, and returns a function of q, k and v,
(B, T, H, D) each, that returns (B, T, H, D).
"""

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from experiments.attention.cases import Attention, Case, Tensors, UnsupportedError

LOCAL_WINDOW = 128  # tokens; each token attends to its own window and one on either side
CAUSAL = "fla linear attention"  # the only contender that is causal

Make = Callable[[Case, torch.device], Attention]


class GivenLayer(nn.Module):
    """Replacement of a linear layer, that ignores its input and returns `tensor`."""

    tensor: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor | None:
        """Return the tensor that was assigned last."""
        return self.tensor


def import_peer(name: str) -> ModuleType:
    """Import a module of an optional package.

    Raises:
        UnsupportedError: the package, or one that it needs, is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(f"cannot be imported ({error})") from error


def on_given_tensors(
    module: nn.Module,
    layers: tuple[str, ...],
    case: Case,
    device: torch.device,
    arrange: Callable[[Tensor], Tensor] = lambda states: states,
    **options: Any,
) -> Attention:
    """Wrap a module of hidden states (B, T, H D), whose projections are replaced.

    Args:
        module: its parameters are cast to the dtype of the case, and get no gradients.
        layers: names of its projections to queries, keys and values; of two, the first is shared
            by queries and keys.
        case: shape and dtype.
        device: device of the module.
        arrange: turns states into what a projection of the module returns.
        options: other arguments of `module.forward`.
    """
    module.to(device, case.dtype).eval().requires_grad_(False)  # eval: no dropout
    given = [GivenLayer() for _ in layers]
    for name, layer in zip(layers, given, strict=True):
        setattr(module, name, layer)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        states = [x.flatten(2) for x in ((q, v) if len(given) == 2 else (q, k, v))]
        for layer, x in zip(given, states, strict=True):
            layer.tensor = arrange(x)
        out = module(states[0], **options)
        for layer in given:
            # A tensor that stays would be one more output of a compiled graph, with a gradient
            layer.tensor = None
        return (out if isinstance(out, Tensor) else out[0]).reshape(q.shape)

    return attention


def linformer(case: Case, device: torch.device) -> Attention:
    """Linformer (arXiv 2006.04768): keys and values projected to 256 positions."""
    width = case.n_head * case.head_dim
    peer = import_peer("linformer.linformer")
    module = peer.LinformerSelfAttention(dim=width, seq_len=case.seq_len, heads=case.n_head)
    module.to_out = nn.Identity()
    return on_given_tensors(module, ("to_q", "to_k", "to_v"), case, device)


def performer(case: Case, device: torch.device) -> Attention:
    """Performer (arXiv 2009.14794): D log D random features of the softmax kernel."""
    # It imports distutils, which Python 3.12 lacks; setuptools installs a replacement on import.
    import_peer("setuptools")
    attend = import_peer("performer_pytorch.performer_pytorch").FastAttention(case.head_dim)
    attend.to(device, case.dtype)
    return lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def local(case: Case, device: torch.device) -> Attention:
    """Local attention: exact in a window."""
    peer = import_peer("local_attention")
    if case.seq_len % LOCAL_WINDOW:
        raise UnsupportedError(f"requires a multiple of {LOCAL_WINDOW} tokens")
    attend = peer.LocalAttention(LOCAL_WINDOW, use_rotary_pos_emb=False)
    return lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def longformer(case: Case, device: torch.device) -> Attention:
    """Longformer (arXiv 2004.05150): exact in a window of 512, without global tokens."""
    peer = import_peer("transformers.models.longformer.modeling_longformer")
    config = _transformers_config("Longformer", case)
    config.attention_window = [config.attention_window]
    window = config.attention_window[0]
    if case.seq_len % window:
        raise UnsupportedError(f"requires a multiple of {window} tokens")
    shape = case.batch, case.seq_len
    options: dict[str, Any] = {
        "attention_mask": torch.zeros(shape, dtype=case.dtype, device=device),
        "is_index_masked": torch.zeros(shape, dtype=torch.bool, device=device),
        "is_global_attn": False,
    }
    module = peer.LongformerSelfAttention(config, layer_id=0)
    # It projects (T, B, H D), and scales the queries in place, which is an error for a leaf's view.
    arrange = lambda states: states.transpose(0, 1).clone()  # noqa: E731
    return on_given_tensors(module, ("query", "key", "value"), case, device, arrange, **options)


def big_bird(case: Case, device: torch.device) -> Attention:
    """BigBird (arXiv 2007.14062): neighbours, two global and three random blocks of 64 keys."""
    peer = import_peer("transformers.models.big_bird.modeling_big_bird")
    config = _transformers_config("BigBird", case)
    too_few = (5 + 2 * config.num_random_blocks) * config.block_size
    if case.seq_len <= too_few:
        raise UnsupportedError(f"requires more than {too_few} tokens")
    ones = torch.ones(case.batch, case.seq_len, dtype=case.dtype, device=device)
    make_masks = peer.BigBirdModel.create_masks_for_block_sparse_attn
    blocked, band, from_mask, to_mask = make_masks(ones, config.block_size)
    masks = {"from_blocked_mask": blocked, "to_blocked_mask": blocked, "band_mask": band}
    masks |= {"from_mask": from_mask, "to_mask": to_mask}
    # Every call draws its random blocks from the same seed, on the CPU
    module = peer.BigBirdBlockSparseAttention(config, seed=0)
    attend = on_given_tensors(module, ("query", "key", "value"), case, device, **masks)
    module.train()  # otherwise, all random blocks are the first block; it has no dropout
    return attend


def reformer(case: Case, device: torch.device) -> Attention:
    """Reformer (arXiv 2001.04451): chunks of 64 after sorting by hash; queries are keys."""
    peer = import_peer("transformers.models.reformer.modeling_reformer")
    config = _transformers_config("Reformer", case, attention_head_size=case.head_dim)
    module = peer.LSHSelfAttention(config, layer_idx=0)
    module._set_num_buckets(case.seq_len)  # else its first call does and logs it: no single graph
    return on_given_tensors(module, ("query_key", "value"), case, device)


def nystromformer(case: Case, device: torch.device) -> Attention:
    """Nystromformer (arXiv 2102.03902): 64 landmarks; without its convolution of the values."""
    peer = import_peer("transformers.models.nystromformer.modeling_nystromformer")
    config = _transformers_config("Nystromformer", case, segment_means_seq_len=case.seq_len)
    module = peer.NystromformerSelfAttention(config)
    module.conv_kernel_size = None
    return on_given_tensors(module, ("query", "key", "value"), case, device)


def fla_linear(case: Case, device: torch.device) -> Attention:
    """Linear attention of fla-core, in chunks, with its Triton kernels."""
    attend = import_peer("fla.ops.linear_attn").chunk_linear_attn
    return lambda q, k, v: attend(q, k, v)[0]


def _transformers_config(name: str, case: Case, **options: Any) -> Any:
    """Configuration of a model of transformers in the shape of a case."""
    make = getattr(import_peer("transformers"), f"{name}Config")
    width = case.n_head * case.head_dim
    shape = {"hidden_size": width, "num_attention_heads": case.n_head}
    return make(**shape, max_position_embeddings=case.seq_len, **options)


def compiled(make: Make, case: Case, device: torch.device) -> Attention:
    """Wrap what `make` returns in torch.compile."""
    # The backward of one saved forward runs many times here, so it must not donate its buffers.
    functorch_config.donated_buffer = False
    return torch.compile(make(case, device), dynamic=False)


def bfloat16_autocast() -> torch.autocast:
    """Run matrix products in bfloat16, also those of an fp32 and a bfloat16 matrix."""
    return torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)


def share_queries(tensors: Tensors) -> Tensors:
    """Use the queries as keys, as the Reformer does."""
    return tensors._replace(k=tensors.q)


EAGER: dict[str, Make] = {
    "Linformer": linformer,
    "Performer": performer,
    "Local": local,
    "Longformer": longformer,
    "BigBird": big_bird,
    "Reformer": reformer,
    "Nystromformer": nystromformer,
}
COMPILED: dict[str, Make] = {
    f"{name}, compiled": partial(compiled, make)
    for name, make in EAGER.items()
    if name != "BigBird"  # its loops over blocks compile for minutes
}
CAPTURABLE = tuple(name for name in EAGER if name != "BigBird")
"""Approximations that compile to one graph. BigBird draws random numbers outside of PyTorch."""
APPROXIMATE: dict[str, Make] = {**EAGER, **COMPILED, CAUSAL: fla_linear}
"""All contenders by name."""

TENSORS = dict.fromkeys(("Reformer", "Reformer, compiled"), share_queries)
# Its iterative inverse multiplies the fp32 identity
SETTINGS = dict.fromkeys(("Nystromformer", "Nystromformer, compiled"), bfloat16_autocast)

PACKAGES = (
    *("linformer", "performer-pytorch", "local-attention", "transformers", "fla-core"),
    *("einops", "triton"),
)
"""Packages whose versions decide the times, besides PyTorch."""

"""The kernels as PyTorch's flash backend, for scaled_dot_product_attention and varlen_attn.

PyTorch has a registry of flash kernels (torch.nn.attention.register_flash_attention_impl). An entry
replaces the CUDA kernels of the five aten operators in which PyTorch's own flash attention ends,
below autograd, torch.compile and torch.func. Calls that these kernels do not support go to the
kernel that was replaced.

Layouts: the operators that begin with `_scaled_dot_product` take (B, H, T, D), the others
(B, T, H, D), or (tokens, H, D) with cum_seq_q and cum_seq_k. Results have the strides that
PyTorch's fakes promise: those of an empty_like of the query, key or value.
"""

import functools
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import attention as torch_attention

from . import triton
from .attention import UNSUPPORTED_REASONS, decide
from .flash_attn import convert_window
from .ops import IMPLEMENTATIONS, launch_bwd, launch_fwd
from .options import AttentionOptions
from .varlen import Batch, Sequences

NAME = "papilio"
"""Name of the entry in PyTorch's registry."""

MIN_PADDED = 2**16
"""Rows up to which a padded batch is small, however few of them are tokens."""

_SDPA = "scaled_dot_product_attention"
_log = logging.getLogger(__name__)
_FLASH = torch_attention.SDPBackend.FLASH_ATTENTION.value  # pyright: ignore


def register_with_torch(*, impl: str | None = None) -> None:
    """Run PyTorch's flash attention on Papilio's kernels, forward and backward.

        papilio.register_with_torch()

    From then on, every model that calls torch.nn.functional.scaled_dot_product_attention or
    torch.nn.attention.varlen.varlen_attn with fp16 or bf16 tensors on a GPU, and without attn_mask,
    uses them: eager or compiled, with causal masks, grouped heads and dropout. Gradients repeat bit
    for bit. PyTorch prefers cuDNN on some GPUs: flash attention is now tried first.

    Calls for which PyTorch does not choose flash attention run as before. If these kernels lack a
    detail of one for which it does, PyTorch's flash attention serves it, and the reason is logged
    once. A varlen_attn that is not causal self-attention is padded to a batch of equal lengths; if
    that takes more than twice the memory, it also stays with PyTorch.

    Call this before torch.compile traces a model, because a compiled model keeps its choice, and
    not between a forward pass and its backward pass. It starts CUDA on the current device: with
    several GPUs, call torch.cuda.set_device before. `unregister_with_torch()` undoes it.

    With TRITON_INTERPRET=1, calls on the CPU also use the kernels, for tests.

    Args:
        impl: of `flash_attention`, "hopper" or "triton"; None picks the fastest for each call.

    Raises:
        ImportError: this version of PyTorch has no such registry.
        ValueError: impl is not one of these kernels.
    """
    if impl is not None and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be None or one of {tuple(IMPLEMENTATIONS)}, got {impl!r}")
    if not hasattr(torch_attention, "register_flash_attention_impl"):
        raise ImportError(
            f"PyTorch {torch.__version__} has no registry of flash kernels: pip install "
            "'torch>=2.11', or call papilio.kernels.flash_attention"
        )
    if not torch.cuda.is_available() and not triton.is_interpreted():
        _log.warning("there is no GPU: PyTorch's attention on the CPU stays as it is")
    register = functools.partial(_Registration, impl)
    torch_attention.register_flash_attention_impl(NAME, register_fn=register)
    torch_attention.activate_flash_attention_impl(NAME)


def unregister_with_torch() -> None:
    """Undo `register_with_torch`: PyTorch uses its own kernels, in its own order, again."""
    if torch_attention.current_flash_attention_impl() == NAME:
        torch_attention.restore_flash_attention_impl()


class _Registration:
    """Active entry of the registry: kernels of aten operators, until `remove`."""

    def __init__(self, impl: str | None) -> None:
        self._library = Library("aten", "IMPL")
        with warnings.catch_warnings():
            # The replaced kernels are restored by `remove`.
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for key in ("CUDA", "CPU") if triton.is_interpreted() else ("CUDA",):
                kernels = _Kernels(impl if key == "CUDA" else "triton", key)
                for operator, kernel in kernels.by_operator().items():
                    self._library.impl(operator, kernel, key)
        self._priority = _prefer_flash()

    def remove(self) -> None:
        """Restore the kernels and the order of backends from before."""
        self._library._destroy()
        if torch._C._get_sdp_priority_order() == _flash_first(self._priority):
            torch._C._set_sdp_priority_order(self._priority)


def _prefer_flash() -> list[int]:
    """Make flash attention the first choice of SDPA, and return the order from before."""
    if torch.cuda.is_available():
        # PyTorch sets its order on the first choice, and would then replace the one set here.
        x = torch.empty(1, 1, 1, 8, device="cuda", dtype=torch.float16)
        torch._fused_sdp_choice(x, x, x)
    priority = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(_flash_first(priority))
    return priority


def _flash_first(priority: list[int]) -> list[int]:
    return sorted(priority, key=lambda backend: backend != _FLASH)


class _Call(NamedTuple):
    """Checked attention call."""

    batch: tuple[Tensor, Tensor, Tensor]  # (B, T, H, D) each
    impl: str
    options: AttentionOptions
    sequences: Sequences | None  # with cum_seq_q and cum_seq_k only


class _UnsupportedError(Exception):
    """Reason why PyTorch's own kernel must serve a call."""


class _Kernels:
    """Kernels of the aten operators for one dispatch key, with the arguments of the operators."""

    def __init__(self, impl: str | None, key: str) -> None:
        self._impl = impl
        self._key = key

    def by_operator(self) -> dict[str, Callable[..., Any]]:
        """Kernel by name of the operator, for those that this version of PyTorch has."""
        kernels = {
            "_flash_attention_forward": self.flash,
            "_flash_attention_forward_no_dropout_inplace": self.flash_inplace,
            "_flash_attention_backward": self.flash_backward,
            "_scaled_dot_product_flash_attention": self.sdpa,
            "_scaled_dot_product_flash_attention_backward": self.sdpa_backward,
        }
        if self._key == "CPU":
            kernels["_scaled_dot_product_flash_attention_for_cpu"] = self.sdpa_cpu
            kernels["_scaled_dot_product_flash_attention_for_cpu_backward"] = self.sdpa_cpu_backward
        return {
            name: _or_replaced(name, self._key, kernel)
            for name, kernel in kernels.items()
            if hasattr(torch.ops.aten, name)
        }

    # ---- operators on (B, T, H, D), or with cum_seq_q and cum_seq_k on (tokens, H, D)

    def flash(self, query: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        out = torch.empty_like(query)
        return out, *self._forward(out, query, *arguments, **options)

    def flash_inplace(self, out: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return self._forward(out, *arguments, **options)[0]

    def flash_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any,
        **options: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        grads = tuple([torch.empty_like(x) for x in (query, key, value)])
        self._backward(grads, grad_out, query, key, value, *arguments, **options)
        return grads

    # ---- operators on (B, H, T, D)

    def sdpa(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
        is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        out = torch.empty_like(query)
        max_q, max_k = query.shape[2], key.shape[2]
        out_view, q, k, v = _transposed(out, query, key, value)
        lse, *rest = self._forward(
            out_view, q, k, v, None, None, max_q, max_k, dropout_p, is_causal, return_debug_mask,
            scale=scale,
        )  # fmt: skip
        return out, lse, None, None, max_q, max_k, *rest

    def sdpa_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
        *arguments: Any, **options: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        grads = tuple([torch.empty_like(x) for x in (query, key, value)])
        dout, q, k, v, out = _transposed(grad_out, query, key, value, out)
        self._backward(_transposed(*grads), dout, q, k, v, out, *arguments, **options)
        return grads

    def sdpa_cpu(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
        is_causal: bool = False, *, attn_mask: Tensor | None = None, scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        _check_cpu(query, key, is_causal, attn_mask)
        out, lse, *_ = self.sdpa(query, key, value, dropout_p, is_causal, scale=scale)
        return out, lse.transpose(1, 2).contiguous().transpose(1, 2)

    def sdpa_cpu_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
        logsumexp: Tensor, dropout_p: float, is_causal: bool, *, attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        _check_cpu(query, key, is_causal, attn_mask)
        dout, q, k, v, out = _transposed(grad_out, query, key, value, out)
        grads = [x.new_empty(x.shape) for x in (q, k, v)]  # contiguous, as the fake promises
        self._backward(
            grads, dout, q, k, v, out, logsumexp, None, None, q.shape[1], k.shape[1], dropout_p,
            is_causal, state=None, unused=None, scale=scale,
        )  # fmt: skip
        return _transposed(*grads)

    # ---- launches

    def _forward(
        self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        return_debug_mask: bool, **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Write out; return lse, the state of dropout, and two unused outputs of the operators."""
        if return_debug_mask:
            raise _UnsupportedError("return_debug_mask=True is not supported")
        call = self._call(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, **options
        )
        sequences, call_options = call.sequences, call.options.for_operators(query.device)
        if sequences is None:
            _, lse = launch_fwd(*call.batch, call.impl, call_options, out)
        elif sequences.padding is None:
            _, lse = launch_fwd(*call.batch, call.impl, call_options, out[None])
            lse = lse[0]
        else:
            padded_out, lse = launch_fwd(*call.batch, call.impl, call_options)
            out.copy_(sequences.tokens(padded_out))
            lse = sequences.lse_tokens(lse)
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        if isinstance(call_options.dropout_seed, Tensor):
            state.view(torch.int64).copy_(call_options.dropout_seed)
        return lse, state, state.new_empty(()), query.new_empty(0)

    def _backward(
        self, grads: Sequence[Tensor], grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor,
        out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
        max_q: int, max_k: int, dropout_p: float, is_causal: bool, state: Tensor | None,
        unused: Tensor | None, **options: Any,
    ) -> None:  # fmt: skip
        """Write the gradients of query, key and value."""
        seed = state[:1].view(torch.int64) if dropout_p and state is not None else None
        call = self._call(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
            dropout_seed=seed, **options,
        )  # fmt: skip
        sequences = call.sequences
        if sequences is not None and sequences.padding is not None:
            q_rows, k_rows, *_ = sequences.padding
            grad_out, out = sequences.pad(grad_out, q_rows), sequences.pad(out, q_rows)
            lse = sequences.pad(logsumexp.t(), q_rows).transpose(1, 2).contiguous()
            padded_grads = [torch.empty_like(x) for x in call.batch]
            launch_bwd(
                (grad_out, None), call.batch, (out, lse), call.impl, call.options, padded_grads
            )
            all_rows = q_rows, k_rows, k_rows
            for grad, padded, rows in zip(grads, padded_grads, all_rows, strict=True):
                grad.copy_(sequences.unpad(padded, rows))
            return
        if sequences is not None:
            grads = [x[None] for x in grads]
            grad_out, out, logsumexp = grad_out[None], out[None], logsumexp[None]
        results = out, logsumexp.contiguous()
        launch_bwd((grad_out, None), call.batch, results, call.impl, call.options, grads)

    def _call(
        self, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *,
        dropout_seed: Tensor | None = None, scale: float | None = None,
        window_size_left: int | None = None, window_size_right: int | None = None, **others: Any,
    ) -> _Call:  # fmt: skip
        """Check a call and prepare its inputs.

        Both passes of a call must end here, or both in PyTorch's kernels, as dropout differs. The
        decision depends on arguments that both have, and on `others` of the forward pass: no
        function of PyTorch differentiates a call with these.

        Raises:
            _UnsupportedError: PyTorch's kernel must serve it.
        """
        for name, argument in others.items():
            if argument is not None:
                raise _UnsupportedError(f"{name} is not supported")
        if self._key == "CPU" and query.dtype == torch.bfloat16:
            raise _UnsupportedError("Triton's interpreter multiplies bfloat16 incorrectly")
        if (cum_seq_q is None) != (cum_seq_k is None):
            raise _UnsupportedError("cum_seq_q without cum_seq_k, or the reverse, is not supported")
        batch, sequences = Batch(query, key, value, None, None), None
        try:
            causal, window_size = is_causal, None
            if window_size_left is not None or window_size_right is not None:
                window = window_size_left, window_size_right
                causal, window_size = convert_window(window, max(max_q, max_k), causal=is_causal)
            if cum_seq_q is not None and cum_seq_k is not None:
                # PyTorch's kernels pad nothing: they serve calls where padding takes much memory.
                # Nothing is cached, as a compiled model may run this in the memory of a CUDA graph.
                n_tokens = len(query) + len(key)
                max_rows = max(2 * n_tokens, MIN_PADDED) if self._key == "CUDA" else None
                sequences = Sequences(
                    cum_seq_q, cum_seq_k, len(query), len(key), max_q, max_k, causal=causal,
                    max_rows=max_rows, cached=False,
                )  # fmt: skip
                batch = sequences.batch(query, key, value)
            # Below autograd and torch.compile, all calls are plain.
            impl, options = decide(
                batch[:3], self._impl, is_plain=True, causal=causal, window_size=window_size,
                softmax_scale=scale, doc_start=batch.doc_start, kv_lengths=batch.kv_lengths,
                dropout_p=dropout_p, dropout_seed=dropout_seed,
            )  # fmt: skip
        except ValueError as error:
            raise _UnsupportedError(str(error)) from error
        if impl not in IMPLEMENTATIONS:
            raise _UnsupportedError(UNSUPPORTED_REASONS["triton"](*batch[:3], options))
        return _Call(batch[:3], impl, options, sequences)


def _transposed(*tensors: Tensor) -> Any:
    """Views of (B, H, T, D) as (B, T, H, D), or the reverse."""
    return tuple([x.transpose(1, 2) for x in tensors])


def _check_cpu(query: Tensor, key: Tensor, is_causal: bool, attn_mask: Tensor | None) -> None:
    """Refuse calls of the CPU's operators that those of the GPU never see."""
    if attn_mask is not None:
        raise _UnsupportedError("attn_mask is not supported")
    if is_causal and query.shape[2] != key.shape[2]:
        raise _UnsupportedError(
            "is_causal=True with other lengths of query and key is not supported"
        )


def _or_replaced(operator: str, key: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Kernel that calls the one it replaces, if any, for calls that `kernel` does not support."""
    name = f"aten::{operator}"
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[key])
    replaced = None
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
        replaced = torch.library.get_kernel(name, key)

    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return kernel(*arguments, **options)
        except _UnsupportedError as error:
            if replaced is None:
                raise NotImplementedError(f"{name} has no kernel on {key}: {error}") from None
            _log_once("varlen_attn" if "scaled" not in operator else _SDPA, str(error))
        return replaced.call_boxed(keys, *arguments, **options)

    return run


_LOGGED: set[tuple[str, str]] = set()


def _log_once(function: str, reason: str) -> None:
    # Sizes in a reason change from call to call, for example those of packed sequences.
    kind = function, re.sub(r"\d+", "", reason)
    if kind not in _LOGGED:
        _LOGGED.add(kind)
        _log.warning("PyTorch's own kernel serves a call of %s: %s", function, reason)

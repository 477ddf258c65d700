"""`TensorCache`: results computed from the values of a tensor, kept for as long as it lives."""

from collections.abc import Callable, MutableMapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Result = TypeVar("Result")


class TensorCache(Generic[Result]):
    """Cache by tensor: all layers of a model pass the same one, and only the first one computes.

    A tensor that an operator of PyTorch wrote to since is a new key, and so is another stream.
    Nothing is cached under torch.compile, which cannot trace the look-up, for tensors of inference
    mode, which have no version, or while a CUDA graph is captured, because calls outside the graph
    must not read its memory.
    """

    def __init__(self) -> None:
        self._results: MutableMapping[Tensor, tuple[tuple, Result]] = WeakTensorKeyDictionary()

    def get(self, tensor: Tensor, compute: Callable[..., Result], *arguments: Any) -> Result:
        """Return compute(tensor, *arguments), from the cache if possible."""
        if is_traced(tensor) or tensor.is_inference():
            return compute(tensor, *arguments)
        stream = torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
        key = stream, tensor._version, *arguments
        cached = self._results.get(tensor)
        if cached is None or cached[0] != key:
            # The first caller may be in inference mode (evaluation), but autograd refuses to save
            # tensors that were made in it.
            with torch.inference_mode(False):
                cached = self._results[tensor] = key, compute(tensor, *arguments)
        return cached[1]


def is_traced(tensor: Tensor) -> bool:
    """Whether the call is compiled or captured in a CUDA graph, so that no value can be read."""
    return torch.compiler.is_compiling() or (
        tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    )

"""KV cache: keys and values of past tokens, so that generation computes each of them only once.

Shapes: B batch, T tokens, H heads, D head_dim.
"""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of up to `capacity` tokens in every layer of a model.

    Memory is allocated when the first keys are appended, in their dtype and on their device:
    2 * n_layer * B * capacity * n_embd elements. A cache belongs to one batch and one model, and
    does not support gradients.
    """

    def __init__(self, n_layer: int, capacity: int) -> None:
        self.n_layer = n_layer
        self.capacity = capacity
        self.length = 0
        """Number of tokens held by every layer, which is the position of the next one."""
        self._keys = self._values = torch.empty(0)  # (n_layer, B, capacity, H, D) once allocated

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens in one layer.

        They count once `advance` is called, after the last layer. So a forward pass that fails
        leaves the cache as it was.

        Args:
            layer: index of the layer, from 0.
            k, v: (B, T_new, H, D); keys after rotary embedding, if any.

        Returns:
            Keys and values of all tokens so far: views, (B, length + T_new, H, D) each.

        Raises:
            ValueError: they exceed the capacity, require gradients, or differ from earlier ones in
                shape, dtype or device.
        """
        end = self.length + k.shape[1]
        if end > self.capacity:
            raise ValueError(
                f"the cache holds {self.length} tokens and has room for {self.capacity}: "
                f"{k.shape[1]} more do not fit. Create it with a larger capacity, or call reset()."
            )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "keys that require gradients cannot be cached, because the cache is written in "
                "place: call the model under torch.no_grad()."
            )
        if self._keys.numel() == 0:
            B, _, H, D = k.shape
            self._keys = k.new_empty(self.n_layer, B, self.capacity, H, D)
            self._values = torch.empty_like(self._keys)
        keys, values = self._keys[layer], self._values[layer]
        like = keys[:, : k.shape[1]]
        if (k.shape, k.dtype, k.device) != (like.shape, like.dtype, like.device):
            raise ValueError(
                f"new keys have shape {tuple(k.shape)}, {k.dtype} on {k.device}, and this cache "
                f"takes {tuple(like.shape)}, {like.dtype} on {like.device}: create another cache."
            )
        keys[:, self.length : end] = k
        values[:, self.length : end] = v
        return keys[:, :end], values[:, :end]

    def advance(self, n_tokens: int) -> None:
        """Add `n_tokens`, which every layer has appended, to the length."""
        self.length += n_tokens

    def reset(self) -> None:
        """Drop all tokens, but keep the memory allocated."""
        self.length = 0

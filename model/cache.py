"""Keys and values of what a model has read, so that a new token need not read it again.

Shapes: B batch, T tokens, H heads, D head_dim.
"""

import torch
from torch import Tensor


class KVCache:
    """Room for the keys and values of `capacity` tokens in every layer of a model.

    The memory is taken when the first keys come, in their dtype and on their device:
    2 * n_layer * B * capacity * n_embd elements. One cache goes with one batch and one model, and
    takes no part in gradients.
    """

    def __init__(self, n_layer: int, capacity: int) -> None:
        self.n_layer = n_layer
        self.capacity = capacity
        self.length = 0
        """Tokens that every layer holds: the next one stands at this position."""
        self._keys = self._values = torch.empty(0)  # (n_layer, B, capacity, H, D) once allocated

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens behind those that the cache holds.

        They count once `advance` is called, after the last layer: a pass that breaks off leaves
        the cache as it was.

        Args:
            layer: whose they are, from 0.
            k, v: (B, T_new, H, D); rotary keys turned already.

        Returns:
            Keys and values of all tokens so far: views, (B, length + T_new, H, D) each.

        Raises:
            ValueError: they do not fit in, or are not like those before, or have gradients.
        """
        end = self.length + k.shape[1]
        if end > self.capacity:
            raise ValueError(
                f"the cache holds {self.length} tokens and has room for {self.capacity}: "
                f"{k.shape[1]} more do not fit. Make it with a larger capacity, or reset() it."
            )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "keys with gradients cannot go into a cache, which overwrites them: call the "
                "model under torch.no_grad()."
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
                f"takes {tuple(like.shape)}, {like.dtype} on {like.device}: begin another one."
            )
        keys[:, self.length : end] = k
        values[:, self.length : end] = v
        return keys[:, :end], values[:, :end]

    def advance(self, n_tokens: int) -> None:
        """Count the tokens that every layer has appended."""
        self.length += n_tokens

    def reset(self) -> None:
        """Forget all tokens and keep the memory."""
        self.length = 0

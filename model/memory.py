"""Whether a model can be made at all: what it asks for in vain should not come from the system."""

import os

import torch

from model.config import BlockConfig


def check_memory(config: BlockConfig, rows: int) -> None:
    """Refuse a model whose float32 weights alone are more than this machine's memory.

    Args:
        rows: vectors of n_embd numbers beside the blocks: of tokens, of positions.

    Raises:
        ValueError: It is; with both numbers. A model without storage (device "meta") never is.
    """
    if torch.get_default_device().type == "meta":
        return
    C = config.n_embd
    heads = 2 * C + 2 * config.kv_heads * config.head_dim
    mlp = (3 if config.mlp == "swiglu" else 2) * config.mlp_width
    needed = 4 * C * (rows + config.n_layer * (heads + mlp))
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ValueError(
            f"a model of model.n_layer={config.n_layer}, model.n_embd={C} and {rows:,} vectors of "
            f"tokens and positions has {needed / 2**30:,.0f} GiB of weights, and this machine "
            f"{there / 2**30:,.0f} GiB of memory: make it smaller, or take a larger machine"
        )

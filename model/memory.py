"""Check that a model fits into memory, before the system kills the process that allocates it."""

import os

import torch

from model.block_config import BlockConfig


def check_memory(config: BlockConfig, table_params: int) -> None:
    """Refuse a model whose float32 weights alone exceed this machine's memory.

    A model without storage (device "meta") is never refused.

    Args:
        config: the blocks of the model.
        table_params: parameters of all tables of tokens and positions.

    Raises:
        ValueError: the weights exceed the memory; the message gives both sizes.
    """
    if torch.get_default_device().type == "meta":
        return
    C = config.n_embd
    heads = 2 * config.attention_width + 2 * config.kv_heads * config.head_dim
    mlp = (3 if config.mlp == "swiglu" else 2) * config.mlp_width
    needed = 4 * (table_params + C * config.n_layer * (heads + mlp))
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise ValueError(
            f"a model with model.n_layer={config.n_layer}, model.n_embd={C} and {table_params:,} "
            f"parameters in embeddings has {needed / 2**30:,.0f} GiB of weights, and this machine "
            f"has {available / 2**30:,.0f} GiB of memory: make it smaller, or use a larger machine"
        )

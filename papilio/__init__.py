"""What another program imports of Papilio: `papilio.kernels`, and attention for transformers.

A wheel has this package alone, with kernels/ of the checkout as `papilio.kernels`. Within a
checkout the same folder is `kernels`; one process imports it under one of the two names.
"""

from .kernels.for_transformers import register_with_transformers  # pyright: ignore

__all__ = ["register_with_transformers"]

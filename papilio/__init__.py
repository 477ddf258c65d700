"""What another program imports of Papilio: `papilio.kernels`, and attention for transformers.

A wheel has this package alone, with kernels/ of the checkout as `papilio.kernels`. Within a
checkout that is the folder `kernels`, and one package under both names (kernels/one_copy.py).
"""

from pathlib import Path

_FOLDER = Path(__file__).parent
if not (_FOLDER / "kernels").is_dir():  # of a checkout, installed or not
    __path__.append(str(_FOLDER.parent))

from .kernels.for_transformers import register_with_transformers  # noqa: E402  # pyright: ignore

del __path__[1:]  # what else is in a checkout is not in this package

__all__ = ["register_with_transformers"]

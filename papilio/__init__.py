"""Public package of Papilio: `papilio.kernels`, and attention for PyTorch and transformers.

A wheel contains only this package, with kernels/ of the checkout as `papilio.kernels`. In a
checkout, `papilio.kernels` and `kernels` are the same package (kernels/one_copy.py).
"""

import tomllib
from importlib.metadata import version
from pathlib import Path

_FOLDER = Path(__file__).parent
if (_FOLDER / "kernels").is_dir():
    __version__ = version("papilio")
else:
    __path__.append(str(_FOLDER.parent))
    # A checkout need not be installed, and another version of Papilio may be.
    _project_file = (_FOLDER.parent / "pyproject.toml").read_text()
    __version__ = tomllib.loads(_project_file)["project"]["version"]

from .kernels.for_torch import register_with_torch, unregister_with_torch  # noqa: E402  # pyright: ignore
from .kernels.for_transformers import register_with_transformers  # noqa: E402  # pyright: ignore

del __path__[1:]  # so that the rest of the checkout is not in this package

__all__ = ["register_with_torch", "register_with_transformers", "unregister_with_torch"]

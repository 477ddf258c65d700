"""Load this package once per process, whichever of its two names is imported.

Programs in a checkout import its folder as `kernels`, others as `papilio.kernels`. Loading it under
both names would register its operators twice, and isinstance would fail between the two copies of a
class.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

NAMES = {"kernels": "papilio.kernels", "papilio.kernels": "kernels"}


def join_loaded_copy(name: str, file: str) -> None:
    """Alias package `name` to the copy that is loaded under its other name, if there is one.

    Args:
        name, file: __name__ and __file__ of the package, which is being imported.

    Raises:
        ImportError: the other name belongs to another copy of Papilio.
    """
    other = NAMES.get(name, "")
    loaded = sys.modules.get(other)
    # PyPI has an unrelated project named `kernels`, which lacks this class.
    if loaded is None or "BlockSparseMask" not in getattr(loaded, "__all__", ()):
        return
    folder, loaded_folder = (Path(f).resolve().parent for f in (file, loaded.__file__ or ""))
    if folder != loaded_folder:
        raise ImportError(
            f"{name} ({folder}) and {other} ({loaded_folder}) are two copies of Papilio, and a "
            "process can load only one: uninstall the other one, or remove its folder from sys.path"
        )
    sys.modules[name] = loaded
    sys.meta_path.insert(0, _Alias(name, other))


class _Alias(MetaPathFinder, Loader):
    """Import hook that resolves modules of package `name` to those of package `other`."""

    def __init__(self, name: str, other: str) -> None:
        self._prefix, self._other = f"{name}.", other

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith(self._prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"{self._other}.{spec.name.removeprefix(self._prefix)}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # Undo what importlib did to the shared module: relative imports within functions compare
        # __spec__ with __package__.
        module.__spec__ = module.__spec__.loader_state

"""One copy of this package in a process, whichever of its names is imported.

Programs of a checkout import its folder as `kernels`, others as `papilio.kernels`. Loaded under
both names, its operators would be registered twice, and the classes of one would be foreign to the
other.
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
    """Make the package `name` the one that is loaded under its other name, if that is so.

    Args:
        name, file: __name__ and __file__ of the package, which is being imported.

    Raises:
        ImportError: the other name belongs to another copy of Papilio.
    """
    other = NAMES.get(name, "")
    loaded = sys.modules.get(other)
    # `kernels` on PyPI is another project
    if loaded is None or "BlockSparseMask" not in getattr(loaded, "__all__", ()):
        return
    folder, loaded_folder = (Path(f).resolve().parent for f in (file, loaded.__file__ or ""))
    if folder != loaded_folder:
        raise ImportError(
            f"{name} ({folder}) and {other} ({loaded_folder}) are two copies of Papilio, and one "
            "process can load one: uninstall the one that you do not need, or take its folder out "
            "of sys.path"
        )
    sys.modules[name] = loaded
    sys.meta_path.insert(0, _Alias(name, other))


class _Alias(MetaPathFinder, Loader):
    """Imports modules of package `name` as those of package `other`."""

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
        # importlib has replaced it; relative imports within functions compare it with __package__
        module.__spec__ = module.__spec__.loader_state

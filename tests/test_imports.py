"""Rooms import only from rooms below them, and without cycles."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "kernels": set(),
    "configs": set(),
    "model": {"kernels"},
    "data": {"kernels"},
    "training": {"configs", "data", "model", "kernels"},
    "evaluation": {"configs", "data", "model", "kernels", "training"},
    "train": {"configs", "data", "model", "kernels", "training"},
}
BELOW = {*MAY_IMPORT}
MAY_IMPORT["scripts"] = BELOW | {"evaluation", "scripts"}
MAY_IMPORT["experiments"] = BELOW | {"evaluation"}
MAY_ALSO_IMPORT = {"experiments.reliability": {"scripts"}}  # it opens files with every command


def imports() -> dict[str, set[str]]:
    """Map each of our modules to those it imports, including imports inside functions."""
    files = [ROOT / "train.py", *(f for room in MAY_IMPORT for f in (ROOT / room).rglob("*.py"))]
    names = {f: ".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files}
    modules = {name.removesuffix(".__init__") for name in names.values()}
    graph = {}
    for file, name in names.items():
        imported = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                package = package_of(file, node.level) + ([node.module] if node.module else [])
                below = {".".join([*package, alias.name]) for alias in node.names}
                imported |= below & modules or {".".join(package)}
        graph[name.removesuffix(".__init__")] = imported & modules
    return graph


def package_of(file: Path, level: int) -> list[str]:
    """Path of the package that an import with `level` leading dots starts from."""
    return [*file.relative_to(ROOT).parts[:-level]] if level else []


def test_kernels_use_relative_imports() -> None:
    """A wheel contains them as papilio.kernels."""
    absolute = [
        (str(file), node.lineno)
        for file in (ROOT / "kernels").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kernels")
        or (isinstance(node, ast.Import) and any(n.name.startswith("kernels") for n in node.names))
    ]
    assert absolute == []


def test_rooms_import_only_rooms_below_them() -> None:
    wrong = [
        (module, other)
        for module, others in imports().items()
        for other in others
        if (room := module.split(".")[0]) != (target := other.split(".")[0])
        and target not in MAY_IMPORT[room] | MAY_ALSO_IMPORT.get(module.rpartition(".")[0], set())
    ]
    assert wrong == []


def test_imports_have_no_cycle() -> None:
    order = list(TopologicalSorter(imports()).static_order())  # raises CycleError
    assert "kernels.attention" in order

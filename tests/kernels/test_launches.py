"""Launches of Triton kernels name the compiler options whose defaults differ between releases."""

import ast
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"


def launches():
    """(file and line, call) of each `some_kernel[grid](...)` in the package."""
    for path in sorted(KERNELS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = node.func.value
                if isinstance(name, ast.Name) and name.id.endswith("_kernel"):
                    yield f"{path.relative_to(KERNELS.parent)}:{node.lineno}", node


def test_every_launch_sets_fp_fusion():
    # Triton 3.10 compiles without fused multiply-adds by default, and 3.9 warns of it. The launches
    # of attention have the option from `Tiles.launch`.
    found = dict(launches())
    assert len(found) >= 10
    without = [
        place
        for place, call in found.items()
        if not any(
            keyword.arg == "enable_fp_fusion"
            or (keyword.arg is None and ast.unparse(keyword.value) == "tiles.launch")
            for keyword in call.keywords
        )
    ]
    assert without == []

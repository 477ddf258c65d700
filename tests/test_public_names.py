"""Public names of the packages `kernels` and `papilio`."""

import subprocess
import sys
import tomllib
from pathlib import Path

import kernels
import papilio

ROOT = Path(__file__).resolve().parent.parent


def test_dir_lists_the_public_names() -> None:
    assert dir(kernels) == sorted(kernels.__all__)
    assert {"flash_attention", "BlockSparseMask", "patterns"} <= {*dir(papilio.kernels)}
    for name in dir(kernels):
        assert getattr(kernels, name).__doc__, name


def test_patterns_are_imported_on_first_use() -> None:
    program = "import papilio.kernels as k; print(k.patterns.streaming(2, 1, 1).tolist())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[[True, False], [True, True]]", done.stderr


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert papilio.__version__ == project["version"]

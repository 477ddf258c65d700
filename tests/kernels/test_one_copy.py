"""`kernels` of a checkout and `papilio.kernels` are one package in a process."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# as in a checkout that is not installed: pip's editable finder also resolves papilio.kernels
NOT_INSTALLED = "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in str(f)]"
ONE = """
import torch, kernels.reference.sdpa, papilio.kernels.reference.sdpa, papilio.kernels.limits
from kernels import limits
assert kernels is papilio.kernels and limits is papilio.kernels.limits
assert kernels.reference.sdpa is papilio.kernels.reference.sdpa
mask = papilio.kernels.BlockSparseMask(torch.ones(1, 1, dtype=torch.bool), 16)
x = torch.zeros(1, 16, 1, 16)
assert kernels.flash_attention(x, x, x, mask=mask).shape == x.shape
"""


def run(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    program = "\n".join([NOT_INSTALLED, *lines])
    command = [sys.executable, "-W", "error::ImportWarning", "-c", program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("names", ["model.gpt, papilio", "papilio, model.gpt"])
def test_both_names_are_one_package(names: str) -> None:
    done = run(ROOT, f"import {names}", ONE)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Folder with papilio.kernels laid out as in a wheel."""
    shutil.copytree(ROOT / "kernels", tmp_path / "papilio" / "kernels")
    (tmp_path / "papilio" / "__init__.py").touch()
    return tmp_path


def test_a_second_copy_is_refused_in_one_sentence(installed: Path) -> None:
    lines = "import papilio.kernels", f"sys.path.insert(0, {str(ROOT)!r})", "import kernels"
    assert run(installed, *lines).stderr.splitlines()[-1] == (
        f"ImportError: kernels ({ROOT / 'kernels'}) and papilio.kernels "
        f"({installed / 'papilio' / 'kernels'}) are two copies of Papilio, and a process can "
        "load only one: uninstall the other one, or remove its folder from sys.path"
    )


def test_another_project_may_be_called_kernels(installed: Path) -> None:
    (installed / "kernels.py").write_text("__all__ = ['get_kernel']")
    for names in ("kernels, papilio.kernels", "papilio.kernels, kernels"):
        done = run(installed, f"import {names}", "assert kernels is not papilio.kernels")
        assert done.returncode == 0, done.stderr

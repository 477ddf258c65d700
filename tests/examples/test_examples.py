"""The programs in examples/ run, and print what their docstrings say."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an example in this process, which has loaded PyTorch, and return its output."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def differences(printed: str) -> list[float]:
    """Extract the numbers in scientific notation."""
    return [float(number) for number in re.findall(r"\d(?:\.\d+)?e[-+]\d+", printed)]


def test_documents_are_independent(run) -> None:
    printed = run("attention_packed_documents")
    assert len(differences(printed)) == 6 and max(differences(printed)) < 1e-5


def test_a_mask_is_drawn_and_agrees_with_dense_attention(run, tmp_path: Path) -> None:
    printed = run("block_sparse_mask", str(tmp_path / "mask.png"))
    assert "computes 45% of the causal scores" in printed
    assert len(differences(printed)) == 1 and max(differences(printed)) < 1e-5
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.distributed
def test_two_processes_give_what_one_gives() -> None:
    command = [sys.executable, *TORCHRUN, ROOT / "examples" / "context_parallel.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\w+):", done.stdout, re.MULTILINE) == ["ring", "gather"]
    assert len(differences(done.stdout)) == 4 and max(differences(done.stdout)) < 1e-5


def test_a_model_of_transformers_learns(run) -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run("transformers_model"))]
    assert len(losses) == 7 and losses[0] > 5.4 and losses[-1] < 2.5


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_linked_and_tested(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= 40
    assert f"(examples/{example.name})" in (ROOT / "README.md").read_text()
    assert example.stem in Path(__file__).read_text()

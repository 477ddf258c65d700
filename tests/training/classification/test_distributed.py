"""The classifier's trainer on two processes, compared with one."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.reliability.dots import CPU, make_config
from tests.training.classification.tiny_classifier import zeros_come_in
from tests.training_runs import losses
from training.classification.scoring import TEST_LOGITS

from train import main  # isort: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return make_config(tmp_path)


def two_processes(*arguments: str) -> None:
    """Run Python with these arguments in a group of two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def assert_same_losses(one: Path, other: Path) -> None:
    first, second = losses(one), losses(other)
    assert first.keys() == second.keys()
    np.testing.assert_allclose(list(first.values()), list(second.values()), rtol=1e-5)


CAUSAL = ["objective=causal", "data.zeros=tokens", "data.phases=[]", "model.context_length=256"]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["labels", "causal", "zeros that come in"])
def test_two_processes_take_the_same_steps(config: Path, tmp_path: Path, variant: str):
    changes = {"labels": [], "causal": CAUSAL, "zeros that come in": zeros_come_in(tmp_path)}
    options = [*CPU, "model.attention_dropout=0", "optim.max_steps=12", *changes[variant]]
    main([str(config), *options])
    two = tmp_path / "two"
    two_processes("train.py", str(config), *options, f"run.out_dir={two}")
    assert_same_losses(tmp_path / "run", two)
    assert '"world_size": 2' in (two / "environments.json").read_text()
    if variant != "causal":
        logits = [np.load(run / TEST_LOGITS) for run in (two, tmp_path / "run")]
        np.testing.assert_allclose(*logits, atol=1e-4)


RECORDER = """
import os, sys, torch, train, training.classification.task as task

batches, target_loss = [], task.target_loss

def recorded_loss(*arguments):
    batches.append([x.clone() for x in arguments[-1]])
    return target_loss(*arguments)

task.target_loss = recorded_loss
train.main(sys.argv[2:])
torch.save(batches, sys.argv[1] + os.environ.get("RANK", "0"))
"""
"""Program that trains and saves the batches of its process."""


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_share_the_batches_of_joined_sets(config: Path, tmp_path: Path):
    (tmp_path / "recorder.py").write_text(RECORDER)
    options = [str(config), *CPU, "model.attention_dropout=0", "optim.max_steps=7"]
    program, two = str(tmp_path / "recorder.py"), f"run.out_dir={tmp_path / 'two'}"
    alone = [sys.executable, program, str(tmp_path / "alone"), *options]
    subprocess.run(alone, check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    two_processes(program, str(tmp_path / "rank"), *options, two)

    def examples(*names: str) -> list[list[tuple]]:
        """Sorted examples of each step: positions, their grey levels, and the label."""
        batches_of = [torch.load(tmp_path / name) for name in names]
        steps = []
        for batches in zip(*batches_of, strict=True):
            rows = []
            for tokens, lengths, positions, labels in batches:
                for row, n in enumerate(lengths.tolist()):
                    ink = positions[row, :n].tolist(), tokens[row, :n].tolist()
                    rows.append((*ink, int(labels[row])))
            steps.append(sorted(rows))
        return steps

    whole = examples("alone0")
    assert [len(rows) for rows in whole] == [8] * 5 + [16] * 2
    assert whole == examples("rank0", "rank1")
    assert_same_losses(tmp_path / "run", tmp_path / "two")

"""--dry-run tells what a run asks for, and starts nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.reader import from_yaml
from data.text.shards import Manifest
from tests.training.classification.tiny_classifier import make_config
from training.dry_run import dry_run_if_asked
from training.language.config import TrainConfig

SMALL = "configs/gpt2_small_1k.yaml"


def told(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        dry_run_if_asked(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_numbers_of_gpt2_small(capsys, monkeypatch) -> None:
    out = told(capsys, SMALL, "--dry-run", "data.path=nowhere", "model.dropout=0")
    assert "124,439,808 parameters, 786,432 of them learned positions" in out
    assert "16 micro-batches x 1 GPU(s) x 32 sequences x 1,024 tokens = 524,288 tokens" in out
    # 6 N + 6 L C T, N without positions
    assert f"{6 * (124_439_808 - 786_432) + 6 * 12 * 768 * 1024:.3g} FLOPs a token" in out
    assert "about 10.0 GiB a GPU" in out and "on 1 x H100" in out
    assert "data.path=nowhere is not there yet" in out


def test_the_whole_configuration_is_one(capsys) -> None:
    out = told(capsys, SMALL, "--dry-run", "optim.lr=0.5")
    text = out.partition("\n\n")[0]
    assert from_yaml(TrainConfig, text).optim.lr == 0.5


def test_gpus_share_the_batch(capsys) -> None:
    out = told(capsys, SMALL, "--dry-run=8")
    assert "2 micro-batches x 8 GPU(s)" in out
    with pytest.raises(ValueError, match=r"3 GPU\(s\)"):
        dry_run_if_asked([SMALL, "--dry-run=3"])
    for wrong in ("0", "many", "-1"):
        with pytest.raises(ValueError, match=f"--dry-run={wrong} must be a number of GPUs"):
            dry_run_if_asked([SMALL, f"--dry-run={wrong}"])


def test_gpus_share_sequences_and_weights(capsys) -> None:
    shared = ("configs/gpt2_small_16k.yaml", "parallel.context=4", "parallel.mode=fsdp")
    out = told(capsys, *shared, "--dry-run=8")
    assert "8 micro-batches x 2 group(s) of 4 GPUs x 2 sequences x 16,384 tokens" in out
    assert "to exchange keys" not in out  # they are gathered where attention has dropout
    assert "0.1 to exchange keys" in told(
        capsys, *shared, "model.attention_dropout=0", "--dry-run=8"
    )
    with pytest.raises(ValueError, match=r"parallel.context=4 GPUs share each .* and 6 are not a"):
        dry_run_if_asked([*shared, "--dry-run=6"])


def test_a_classifier(capsys) -> None:
    out = told(capsys, "configs/lra/image.yaml", "--dry-run")
    assert "examples of 1,024 tokens on 1 GPU(s)" in out


QUICK = "configs/quickstart.yaml"


def test_epochs_are_reported_and_too_many_are_warned_of(capsys, corpus) -> None:
    n_tokens = Manifest.load(corpus).splits["train"].tokens
    options = (QUICK, "--dry-run", f"data.path={corpus}")
    batch = ("optim.batch_tokens=2048", "optim.warmup_steps=0")
    out = told(capsys, *options, *batch, f"optim.max_steps={5 * n_tokens // 2048}")
    assert f"epochs of the {n_tokens:,} tokens of {corpus}" in out and "warning" not in out
    found = re.search(r"([\d.]+) epochs of", out)
    assert found and 4.5 < float(found[1]) <= 5
    out = told(capsys, *options, *batch, f"optim.max_steps={11 * n_tokens // 2048}")
    found = re.search(r"warning: .* more than 10 times. Set optim.max_steps=(\d+), or", out)
    assert found and 9 * n_tokens < int(found[1]) * 2048 <= 10 * n_tokens
    mixed = f"data.mix=[{{path: {corpus.parent / 'none'}, weight: 1.0}}]"
    half = told(capsys, *options, *batch, f"optim.max_steps={11 * n_tokens // 2048}", mixed)
    assert "warning" not in half and f"{corpus.parent / 'none'} is not there yet" in half


def test_epochs_of_a_classifier(capsys, tmp_path) -> None:
    out = told(capsys, str(make_config(tmp_path)), "--dry-run")
    assert f"{19 * 16 / 256:.2f} epochs of the 256 examples of {tmp_path / 'dots'}" in out


def test_nothing_is_asked() -> None:
    dry_run_if_asked([SMALL, "run.out_dir=--dry-running"])


def test_the_command_needs_neither_pytorch_nor_data(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    program = (
        "import runpy, sys; sys.modules['torch'] = None; "
        f"sys.argv = ['train.py', '{root / SMALL}', '--dry-run']; "
        f"sys.path.insert(0, '{root}'); runpy.run_path('{root / 'train.py'}', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "124,439,808 parameters" in done.stdout
    assert not list(tmp_path.iterdir())

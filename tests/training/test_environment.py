import json
import subprocess
import sys

import pytest
import torch

from training import environment
from training.environment import ENVIRONMENTS, commit, read_starts, record_start
from training.metrics import METRICS


def test_a_run_records_the_machine_of_each_start(tmp_path, monkeypatch):
    def start_on(name, step):
        monkeypatch.setattr(environment, "machine", lambda: {"device": name})
        record_start(tmp_path, step)
        return [(start["device"], start["from_step"]) for start in read_starts(tmp_path)]

    assert read_starts(tmp_path) == []
    assert start_on("a", 0) == [("a", 0)]
    assert start_on("b", 0) == [("b", 0)]  # machine a saved no checkpoint
    assert start_on("c", 50) == [("b", 0), ("c", 50)]
    assert start_on("d", 50) == [("b", 0), ("d", 50)]
    assert start_on("e", 70) == [("b", 0), ("d", 50), ("e", 70)]
    record_start(tmp_path, 80, world_size=2)
    assert [start["world_size"] for start in read_starts(tmp_path)] == [1, 1, 1, 2]


def test_the_cost_of_the_initial_weights_is_recorded(tmp_path):
    origin, here = tmp_path / "origin", tmp_path / "here"
    origin.mkdir()
    here.mkdir()
    record_start(here, 0, origin=origin)  # an imported model, for example
    assert read_starts(here)[0]["before"] is None
    last = {"step": 9, "tokens": 90, "gpu_hours": 0.5, "val_loss": 4.0}
    records = [last | {"step": 5}, last | {"other": 1}, {"step": 10, "loss": 1.0}]
    (origin / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    record_start(here, 0, origin=origin)
    record_start(here, 5)
    assert [start.get("before") for start in read_starts(here)] == [last, None]


def test_the_cost_of_a_chain_of_runs_is_summed(tmp_path):
    runs = [tmp_path / name for name in ("first", "second", "third")]
    for tokens, run in enumerate(runs, start=1):
        run.mkdir()
        record = {"step": 9, "tokens": tokens, "gpu_hours": tokens / 4, "val_loss": 4.0 / tokens}
        (run / METRICS).write_text(json.dumps(record) + "\n")
    record_start(runs[0], 0)
    record_start(runs[1], 0, origin=runs[0])
    record_start(runs[2], 0, origin=runs[1])
    assert read_starts(runs[2])[0]["before"] == {
        "step": 9, "tokens": 1 + 2, "gpu_hours": 3 / 4, "val_loss": 2.0
    }  # fmt: skip
    record_start(runs[1], 0, origin=tmp_path)  # its cost is unknown
    record_start(runs[2], 0, origin=runs[1])
    assert read_starts(runs[2])[0]["before"] is None


def test_commit_of_a_copy(monkeypatch):
    monkeypatch.setenv("PAPILIO_COMMIT", "abc1234")
    assert commit() == "abc1234"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Folder that replaces this checkout."""
    monkeypatch.delenv("PAPILIO_COMMIT", raising=False)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    return tmp_path


def test_commit_of_a_checkout(checkout):
    def git(*arguments):
        command = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)

    assert commit() is None  # no checkout
    git("init")
    (checkout / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    clean = git("rev-parse", "--short", "HEAD").stdout.strip()
    assert commit() == clean
    (checkout / "file").write_text("2")
    assert commit() == clean + "+"


def test_an_invalid_repository_has_no_commit(checkout):
    (checkout / ".git").mkdir()  # holds nothing
    assert commit() is None


def test_no_commit_without_git(checkout, monkeypatch):
    (checkout / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert commit() is None


def test_training_records_each_start(run):
    for steps, starts in ((4, [0]), (4, [0]), (8, [0, 4])):  # the second only evaluates again
        run(f"optim.max_steps={steps}", "optim.warmup_steps=0")
        assert [start["from_step"] for start in read_starts(run.out_dir)] == starts
        assert read_starts(run.out_dir)[-1]["torch"] == torch.__version__
        assert read_starts(run.out_dir)[-1]["world_size"] == 1


@pytest.mark.parametrize(
    "text",
    [
        *("{", "{}", "[3]", '[{"from_step": "0"}]', "[" * 100_000),
        '[{"from_step": 0, "before": 3}]',
        '[{"from_step": 0, "before": {"tokens": 3}}]',
        '[{"from_step": 0, "before": {"step": 3, "tokens": "3"}}]',
        '[{"from_step": 0, "device": ["a"]}]',
        '[{"from_step": 0, "world_size": "2"}]',
    ],
)
def test_damage_is_reported(tmp_path, text):
    (tmp_path / ENVIRONMENTS).write_text(text)
    with pytest.raises(ValueError, match="environments.json is damaged"):
        read_starts(tmp_path)


def test_a_machine_without_triton_is_described(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert environment.machine()["triton"] is None


def test_a_build_for_gpus_has_no_cuda_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment.machine()["cuda"] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert (environment.machine()["device"], environment.machine()["cuda"]) == ("a GPU", "13.0")

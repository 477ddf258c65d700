"""A run folder is used by one trainer at a time."""

from pathlib import Path

import pytest

from data.files import lock_folder
from tests.training_runs import losses, train_on_two_processes
from training.metrics import read_metrics
from training.stop import check_folder

import train  # isort: skip

REFUSAL = (
    "run.out_dir={} is in use by another training process. Wait for it, stop it, or choose another "
    "run.out_dir"
)


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("/", "is the current folder, a home folder, or a parent of one"),
        ("", "is the current folder"),
        ("~", "is the current folder, a home"),
        ("..", "is the current folder, a home folder, or a parent of one"),
        ("data", "contains prepared data"),
    ],
)
def test_shared_folders_are_refused_as_run_folders(tmp_path, monkeypatch, folder, reason):
    here = tmp_path / "here"
    (here / "data").mkdir(parents=True)
    (here / "data" / "manifest.json").touch()
    monkeypatch.chdir(here)
    path = Path(folder).expanduser()
    with pytest.raises(ValueError, match=f"^run.out_dir=.* {reason}.*. Try run.out_dir=out/NAME"):
        check_folder(path)


def test_a_run_in_the_current_folder_may_resume(tmp_path, monkeypatch):
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    check_folder(Path())


@pytest.mark.parametrize("names", [["config.yaml", "checkpoints"], ["metrics.jsonl"]])
def test_a_project_with_files_of_these_names_is_not_a_run(tmp_path, monkeypatch, names):
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is the current folder"):
        check_folder(Path())


@pytest.mark.parametrize("name", ["new", "empty", "with_logs", "a_run"])
def test_folders_of_a_run_are_accepted(tmp_path, name):
    for folder in ("empty", "with_logs/torchrun", "a_run/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    check_folder(tmp_path / name)


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("waits_for_saves")
def test_a_second_trainer_is_refused_and_changes_nothing(run, tmp_path, monkeypatch):
    whole = run(f"run.out_dir={tmp_path / 'whole'}")
    refused_at = []

    record = train.Trainer.record

    def start_another(self, entry, **values):
        record(self, entry, **values)
        step = self.step
        if step in (1, 6) and step not in refused_at:  # before its first checkpoint and after
            refused_at.append(step)
            before = content(run.out_dir)
            for other in ("run.seed=1", "data.path=nowhere"):
                with pytest.raises(ValueError) as refused:
                    run(other)
                assert str(refused.value) == REFUSAL.format(run.out_dir)
            assert content(run.out_dir) == before

    monkeypatch.setattr("train.Trainer.record", start_another)
    assert run() == whole
    assert refused_at == [1, 6]
    assert losses(run.out_dir) == losses(tmp_path / "whole")
    records = read_metrics(run.out_dir)
    assert [r["step"] for r in records if "val_loss" in r] == [4, 8]
    names = [sorted(path.name for path in f.iterdir()) for f in (run.out_dir, tmp_path / "whole")]
    assert names[0] == names[1]


def test_a_refused_configuration_leaves_no_new_folder(run):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run("data.path=nowhere")
    assert not run.out_dir.exists()
    run.out_dir.mkdir()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run("data.path=nowhere")
    assert run.out_dir.exists()


@pytest.mark.distributed
@pytest.mark.parametrize("taken", [True, False], ids=["taken", "no folder"])
def test_two_processes_are_refused_together(run, taken):
    if taken:
        run.out_dir.mkdir()
        with lock_folder(run.out_dir, ""):
            ends = train_on_two_processes(run)
        said = REFUSAL.format(run.out_dir)
        assert list(run.out_dir.iterdir()) == []
    else:
        run.out_dir.write_text("a file")
        ends = train_on_two_processes(run)
        said = f"[Errno 17] File exists: '{run.out_dir}'"
    for status, stderr in ends:
        assert status == 1
        assert f"error: {said}\n" in stderr
        assert "Traceback" not in stderr

"""The whole of Table 4 on tiny models: trained, scored, reported, and not done twice."""

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from data.files import load_sealed, sealed, to_json
from data.text.prepare import prepare
from data.text.shards import TokenStream
from data.text.sources import open_source
from evaluation.runs import jobs_per_gpu
from evaluation.sums import read_scored, write_scored
from experiments import gpu_pool, sweep
from experiments.table4 import report
from experiments.table4.report import markdown
from experiments.table4.sweep import make_plan
from tests.experiments.table4 import tiny_sweep
from tests.experiments.table4.tiny_sweep import FinishedProcess, trained, without_pictures
from training.environment import read_starts
from training.language.config import load_config
from training.metrics import METRICS, read_metrics


def seeds_of(out):
    (table,) = json.loads((out / "table4.json").read_text())["rows"].values()
    return {row["label"]: row["seeds"] for row in table}


def test_trains_scores_and_reports_once(monkeypatch, corpus, tmp_path):
    tiny = tiny_sweep.sweep(monkeypatch, corpus, tmp_path)  # and draws
    out, ran = tiny("--models", "short", "long_from_short")
    assert len(trained(ran)) == 2 * 3  # two seeds, and long comes along

    result = json.loads((out / "table4.json").read_text())
    (table,) = result["rows"].values()
    assert [row["label"] for row in table] == ["short", "long", "long_from_short"]
    assert all(row["seeds"] == 2 for row in table)
    assert {row["tokens"] for row in table[:2]} == {20 * 256}
    # what the short model took counts for the one that it was extended to
    extended = table[2]
    last = [
        [read_metrics(out / f"{name}_seed{seed}")[-1] for seed in (1, 2)]
        for name in ("short", "long_from_short")
    ]
    assert extended["tokens"] == sum(records[0]["tokens"] for records in last)
    assert extended["gpu_hours"] == pytest.approx(
        sum(record["gpu_hours"] for records in last for record in records) / 2
    )
    assert len({row["scored_tokens"] for row in table}) == 1
    assert {run["text_tokens"] for run in result["runs"]} == {len(TokenStream(corpus, "train"))}
    for row in table:
        assert row["perplexity"] == pytest.approx(math.exp(row["nats"]))
    assert table[0]["difference"] is None
    gap = table[1]["difference"]
    assert gap["nats"] == pytest.approx(table[1]["nats"] - table[0]["nats"])
    assert gap["interval"][0] < gap["nats"] < gap["interval"][1]

    curves = [
        [r["val_loss"] for r in read_metrics(out / f"short_seed{seed}") if "val_loss" in r]
        for seed in (1, 2)
    ]
    curve = [point["val_loss"] for point in result["curves"]["short"]]
    assert curve == pytest.approx([sum(pair) / 2 for pair in zip(*curves, strict=True)])
    assert len(curve) >= 2

    text = (out / "table4.md").read_text()
    assert text == markdown(result)
    assert f"| long | 2 | 0M | {table[1]['tokens_per_s']:,.0f} |" in text
    (there,) = read_starts(out / "long_seed2")
    assert there["from_step"] == 0 and text.endswith(f"commit {there['commit']}.\n")
    assert (out / "table4.png").stat().st_size > 10_000
    assert (out / f"evaluation_{corpus.name}" / "report.md").exists()

    # the extension had the remaining time, and started from the short model's weights
    begun = load_config([str(out / "long_from_short_seed2" / "config.yaml")])
    assert begun.run.init_from == str(out / "short_seed2")
    assert begun.optim.max_steps == 10  # as the short model took half the time of the long one's 20

    # what is committed is enough to draw it all again
    (out / "table4.md").unlink()
    report.redraw(out / "table4.json")
    assert (out / "table4.md").read_text() == text

    without_pictures(monkeypatch)
    _, ran = tiny("--models", "short", "long_from_short")
    assert trained(ran) == []
    _, ran = tiny("--models", "short", "long", "--report-only")
    assert ran == []


def test_runs_whose_times_count_do_not_share_a_gpu(tiny, capsys):
    names = ["--models", "short", "long_from_short"]
    share = ["--jobs-per-gpu", "2"]
    with pytest.raises(ValueError, match="--jobs-per-gpu=2 must be 1 for .*long_from_short_seed1"):
        tiny(*names, *share)
    with pytest.raises(ValueError, match="--jobs-per-gpu=2 must be 1 for short_seed1: their times"):
        tiny(*names, *share, "--only", "short_seed1")
    for options, message in (
        (["--jobs-per-gpu", "0"], "--jobs-per-gpu=0 must be at least 1"),
        ([*share, "--gpus-per-run", "2"], "not allowed with argument --gpus-per-run"),
    ):
        with pytest.raises(SystemExit):
            tiny("--models", "short", *options)
        assert message in capsys.readouterr().err


def test_other_runs_may_share_a_gpu(tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "experiments.table4.sweep.train_and_report",
        lambda *args, **named: asked.append((args, named)),
    )
    out, _ = tiny("--models", "short", "--jobs-per-gpu", "2")
    (((tasks, _), named),) = asked
    assert named["runs_per_gpu"] == 2
    folder = out / tasks[0].name
    assert jobs_per_gpu(folder) is None
    tasks[0].commands(1)  # called when the task starts
    assert jobs_per_gpu(folder) == 2


def test_a_run_from_weights_that_were_trained_on_a_shared_gpu_has_no_time_of_its_own(
    tiny, monkeypatch
):
    tasks = []
    monkeypatch.setattr(
        "experiments.table4.sweep.train_and_report", lambda asked, *_, **__: tasks.extend(asked)
    )
    costs = {"short_seed1": {"jobs_per_gpu": 2}}
    monkeypatch.setattr(
        "experiments.table4.sweep.training_cost", lambda folder, sums: costs.get(folder.name)
    )
    out, _ = tiny("--models", "short_then_long")
    for task in tasks:
        task.commands(1)  # called when the task starts
    shared = {task.name: jobs_per_gpu(out / task.name) for task in tasks}
    assert shared == {
        "short_seed1": 1, "short_seed2": 1, "short_then_long_seed1": 2, "short_then_long_seed2": 1
    }  # fmt: skip


@pytest.mark.slow
def test_machines_share_the_seeds(tiny, tmp_path):
    names = ["--models", "short", "long_from_short"]
    with pytest.raises(SystemExit):  # argparse: one or the other
        tiny(*names, "--only", "*_seed1", "--report-only")
    with pytest.raises(ValueError, match=r"leaves out long_seed1, short_seed1, which other runs"):
        tiny(*names, "--only", "*_seed2")
    with pytest.raises(ValueError, match=r"--only=\*_seed3 must match .*: long_seed1, short_seed1"):
        tiny(*names, "--only", "*_seed1", "*_seed3")
    out, _ = tiny(*names, "--only", "*_seed1")
    one_machine = tmp_path / "one_machine"
    out.rename(one_machine)
    with pytest.raises(ValueError, match=r"leaves out long_seed1, short_seed1, .* files in .*sums"):
        tiny(*names, "--only", "*_seed2")
    kept = shutil.copytree(one_machine / "sums", out / "sums")  # has the times of seed 1
    with pytest.raises(ValueError, match="leaves out short_seed1, which other runs need"):
        tiny(*names, "--only", "long_from_short_seed1")  # for its weights
    half = shutil.copytree(one_machine / "short_seed1", out / "short_seed1")
    (half / METRICS).write_text("")  # not its last weights, for all that one can tell
    with pytest.raises(ValueError, match="leaves out short_seed1, which other runs need"):
        tiny(*names, "--only", "long_from_short_seed1")
    shutil.rmtree(half)
    (next(iter(kept.iterdir())) / "long_from_short_seed1.npz").unlink()
    out, ran = tiny(*names, "--only", "long_seed2", "*_seed2")
    assert trained(ran) == ["long_seed2", "short_seed2", "long_from_short_seed2"]
    begun = [
        load_config([str(folder / "config.yaml")])
        for folder in (one_machine / "long_from_short_seed1", out / "long_from_short_seed2")
    ]
    assert begun[0].optim.max_steps == begun[1].optim.max_steps

    (own,) = (out / "sums").glob("*/long_seed2.npz")
    before = own.read_bytes()
    other = shutil.copytree(one_machine / "sums", tmp_path / "other")
    (other / own.parent.name / own.name).write_bytes(b"not read, as the file exists")
    _, ran = tiny(*names, "--report-only", "--add", str(other))
    assert ran == []
    assert seeds_of(out) == {"short": 2, "long": 2, "long_from_short": 2}
    assert own.read_bytes() == before
    with pytest.raises(FileNotFoundError, match=r"--add=\S+ has no scores CORPUS/RUN.npz"):
        tiny(*names, "--report-only", "--add", str(tmp_path))


def test_a_finished_run_can_be_continued_by_another(tiny):
    names = ("--models", "short", "short_then_long", "--seeds", "1", "--only")
    tiny(*names, "short_seed1")
    _, ran = tiny(*names, "short_then_long_seed1")
    assert trained(ran) == ["short_then_long_seed1"]


@pytest.mark.slow
def test_runs_whose_sums_are_there_are_not_trained_for_their_folders(tiny, corpus, capsys):
    names = ["--models", "short", "long", "short_then_long", "--seeds"]
    out, _ = tiny(*names, "1")
    for folder in out.glob("*_seed1"):
        shutil.rmtree(folder)
    capsys.readouterr()

    _, ran = tiny(*names, "2")  # one seed more
    assert sorted(trained(ran)) == ["long_seed2", "short_seed2", "short_then_long_seed2"]
    said = capsys.readouterr().out
    assert "full names in --only): short_seed1, long_seed1, short_then_long_seed1\n" in said
    assert seeds_of(out) == {"short": 2, "long": 2, "short_then_long": 2}

    (out / "sums" / corpus.name / "short_then_long_seed1.npz").unlink()
    _, ran = tiny(*names, "2")  # and the weights that it starts with
    assert sorted(trained(ran)) == ["short_seed1", "short_then_long_seed1"]
    kept = "long_seed1, short_seed2, long_seed2, short_then_long_seed2"
    assert f"full names in --only): {kept}\n" in capsys.readouterr().out

    for name in ("short_seed1", "short_seed2"):  # what started with their weights is finished
        shutil.rmtree(out / name)
    (out / "sums" / corpus.name / "short_then_long_seed2.npz").unlink()
    before = json.loads((out / "table4.json").read_text())
    _, ran = tiny(*names, "2")
    assert [words[2] for words in ran] == [str(out / "short_then_long_seed2")]  # scored again
    after = json.loads((out / "table4.json").read_text())
    assert after["rows"] == before["rows"] and after["curves"] == before["curves"]

    # nor for checkpoints that were deleted to save room
    for checkpoints in out.glob("*_seed2/checkpoints"):
        shutil.rmtree(checkpoints)
    _, ran = tiny(*names, "2")
    assert ran == []

    # what is in a folder is another training than the one that was scored
    path = out / "sums" / corpus.name / "short_then_long_seed1.npz"
    scored, text = read_scored(path)
    write_scored(replace(scored, about=scored.about | {"gpu_hours": 9.0}), text, out / "sums")
    _, ran = tiny(*names, "2")
    assert [words[2] for words in ran] == [str(out / "short_then_long_seed1")]
    assert read_scored(path)[0].about == scored.about


@pytest.mark.slow
def test_times_are_of_one_machine(tiny, corpus):
    names = ["--models", "short", "long_from_short", "--seeds"]
    out, _ = tiny(*names, "2")
    shutil.move(out / "sums", out.with_name("kept"))
    shutil.rmtree(out)
    shutil.move(out.with_name("kept"), out / "sums")
    sums = out / "sums" / corpus.name

    # of a second seed the weights alone are missing, its time is that of the first
    (sums / "long_from_short_seed2.npz").unlink()
    _, ran = tiny(*names, "2")
    assert sorted(trained(ran)) == ["long_from_short_seed2", "short_seed2"]
    # of the first seed both: what it is measured by must be as fast as this machine
    (sums / "long_from_short_seed1.npz").unlink()
    _, ran = tiny(*names, "1")
    assert sorted(trained(ran)) == ["long_from_short_seed1", "long_seed1", "short_seed1"]


def test_a_restarted_run_is_trained_to_its_end(tiny):
    names = ("--models", "short", "--seeds", "1")
    out, _ = tiny(*names)
    (out / "short_seed1" / METRICS).write_text("")  # stopped before its first evaluation
    _, ran = tiny(*names)
    assert [words[0] for words in ran] == ["train.py", "-m"]


def test_all_runs_are_scored_by_one_plan():
    def job(context_length):
        model = SimpleNamespace(context_length=context_length)
        return SimpleNamespace(config=SimpleNamespace(model=model))

    jobs = [job(64), job(32), job(64), job(128)]
    plan = make_plan(jobs, None, None)
    assert (plan.strides, plan.histories) == (None, (32, 64, 128))
    assert (plan.near, plan.first) == (32, 128)
    plan = make_plan(jobs, [16], [32])
    assert (plan.strides, plan.histories) == (
        (16,),
        (32, 128),
    )  # the longest determines the scored tokens


def test_several_gpus_share_a_run(tiny, monkeypatch):
    seen = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setattr(
        sweep, "run_tasks", lambda tasks, groups, _: seen.append((tasks, groups)) or []
    )
    with pytest.raises(ValueError, match="has no run to report on"):
        tiny("--models", "short", "--gpus-per-run", "2", "--set", "optim.lr=0.5")
    ((tasks, groups),) = seen
    assert groups == [["0", "1"], ["2", "3"]]
    for task in tasks:
        train, scoring = task.commands(2)
        assert "--nproc_per_node=2" in train and "--nproc_per_node=2" in scoring
        assert "optim.micro_batch_size=4" in train  # of 32 tokens: half of a batch of 256
        assert train[-1] == "optim.lr=0.5"


def test_several_corpora_are_scored_by_one_command_a_run(tiny, corpus, other_corpus):
    out, ran = tiny("--models", "short", "--score-on", str(corpus), str(other_corpus))
    assert [words[0] for words in ran] == ["train.py", "-m"] * 2
    tables = json.loads((out / "table4.json").read_text())["rows"]
    assert list(tables) == ["shards", "birds"]
    for name, (row,) in tables.items():
        report = json.loads((out / f"evaluation_{name}" / "evaluation.json").read_text())
        assert report["data"]["name"] == name
        assert report["as_trained"][0]["nats"] == row["nats"]
    assert tables["shards"][0]["nats"] != tables["birds"][0]["nats"]


@pytest.fixture
def fails(monkeypatch):
    """Function that selects the runs whose training fails."""

    run_here = gpu_pool._start

    def let_fail(name):
        def run_some(command, *rest):
            failing = "train.py" in command and any(name in word for word in command)
            return FinishedProcess(1) if failing else run_here(command, *rest)

        monkeypatch.setattr("experiments.gpu_pool._start", run_some)

    return let_fail


def test_a_run_that_fails_is_named_and_left_out(tiny, fails, capsys):
    fails("long_seed")
    with pytest.raises(SystemExit, match="1"):
        tiny("--models", "short", "long_from_short", "--seeds", "1")
    said = capsys.readouterr().out
    assert "these runs failed: long_seed1, long_from_short_seed1\n" in said
    assert "not in the report: failed: long_seed1, long_from_short_seed1\n" in said
    assert "| short | 1 |" in said


def test_a_run_that_fails_is_not_reported_as_it_was_before(tiny, fails):
    names = ("--models", "short", "long", "--seeds", "1")
    out, _ = tiny(*names)
    shutil.rmtree(out / "long_seed1")
    fails("long_seed")
    with pytest.raises(SystemExit, match="1"):
        tiny(*names, "--only", "long_seed1")
    assert seeds_of(out) == {"short": 1}


def test_a_context_between_those_of_a_sweep_can_be_added_to_it(tiny):
    histories = ("--histories", "32", "128", "--seeds", "1")
    tiny("--models", "short", "longest", *histories)
    out, ran = tiny("--models", "short", "long", "longest", *histories)
    assert [words[0] for words in ran].count("train.py") == 1
    report = json.loads((out / "evaluation_shards" / "evaluation.json").read_text())
    assert [(row["label"], row["history"]) for row in report["strided"]] == [
        ("short", 32), ("long", 32), ("long", 64), ("longest", 32), ("longest", 128),
    ]  # fmt: skip
    assert len({row["tokens"] for row in report["strided"]}) == 1
    # windows that slide by 64 show 7/8 of 64 tokens to 9 of these, and 7/8 of 128 to 17
    with pytest.raises(ValueError, match=r"--histories=32 128 must .* Try --histories 32 64 128"):
        tiny("--models", "short", "long", "longest", *histories, "--stride", "4", "64")


def test_runs_that_cannot_be_scored_or_reported_are_refused_before_training(tiny, corpus, tmp_path):
    elsewhere = shutil.copytree(corpus, tmp_path / corpus.name)
    other = shutil.copytree(corpus, tmp_path / "other")
    manifest = other / "manifest.json"
    values = load_sealed(manifest)
    values["tokenizer"]["sha256"] = "0123"
    manifest.write_bytes(to_json(sealed(values)))
    for split, birds in (("train", 1), ("val", 18)):  # 18 are enough for all but other text
        line = json.dumps({"text": "a dog follows one bird. " * birds})
        (tmp_path / f"{split}.jsonl").write_text(line + "\n")
    source = open_source([str(tmp_path / "train.jsonl")], val=[str(tmp_path / "val.jsonl")])
    prepare(source, tmp_path / "short_text", tokenizer=str(corpus / "tokenizer.json"))
    for options, message in (
        ("short --report-only", r"sums has no run to report on \(not trained and sco"),
        (f"short --score-on {corpus} {elsewhere}", "are both called shards"),
        (f"short --score-on {other}", r"--score-on=.*other has a tokenizer with sha256=0123"),
        (
            f"short long --score-on {tmp_path / 'short_text'}",
            r"short_text has \d+ tokens, and control=replace with",
        ),
        ("short --stride 512", "--stride=512 must be from 1 to .*, 32 tokens"),
        ("short long --stride 64", "--stride=64 must be at most 32, the context of a run"),
        ("short long --histories 32 65", "--histories=65 must be from 1 to .*, 64 tokens"),
        ("short --stride 27 29 31 32", "none of the 968 tokens of .* sees 7/8 of"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny("--models", *options.split())
    assert not (tmp_path / "out").exists()

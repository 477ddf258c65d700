"""The whole of Table 4 on tiny models: trained, scored, reported, and not done twice."""

import json
import math
import shutil
from dataclasses import replace

import pytest

from configs import load_config
from scripts import evaluate, gpu_pool, reproduce_table4, table4_plan
from scripts.evaluation_sums import read_scored, write_scored
from scripts.table4_models import BUDGETS, Budget, Model
from scripts.table4_report import markdown
from training.environment import read_starts
from training.metrics import read_metrics

TINY = (
    "model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.positions=rotary",
    "model.dropout=0", "model.attention_dropout=0", "optim.lr=1e-2",
    "run.device=cpu", "run.dtype=float32", "run.compile=false",
)  # fmt: skip
SHORT, LONG = ("model.context_length=32",), ("model.context_length=64",)
BUTTERFLY = ("model.mask.pattern=butterfly", "model.mask.block_size=16")


@pytest.fixture
def tiny(monkeypatch, corpus, tmp_path):
    """Models of 32 and 64 tokens, in this process; returns a function that runs the command."""
    models = {
        "short": Model(context="1k", overrides=SHORT),
        "long": Model(context="4k", overrides=LONG),
        "long_butterfly": Model(context="4k", overrides=(*LONG, *BUTTERFLY)),
        "long_from_short": Model(
            context="4k", overrides=LONG, starts_from="short", same_time_as="long"
        ),
        "short_then_long": Model(context="4k", overrides=LONG, starts_from="short", share=1 / 2),
        "short_documents": Model(context="1k", overrides=(*SHORT, "data.document_mask=true")),
    }
    budget = Budget(steps=20, batch_tokens=256, seeds=2, overrides=TINY)
    for module in (table4_plan, reproduce_table4):
        monkeypatch.setattr(module, "MODELS", models)
    monkeypatch.setitem(BUDGETS, "smoke", budget)
    ran = []

    def run_here(command, *_):
        """Instead of a child, which would take seconds to start."""
        from train import main

        ran.append(command[1:])
        program, *arguments = command[1:]
        if program == "train.py":
            main(arguments)
        else:
            assert arguments[0] == "scripts.evaluate"
            evaluate.main([*arguments[1:], "--device", "cpu"])
        return FinishedProcess()

    monkeypatch.setattr("scripts.gpu_pool._start", run_here)

    def reproduce(*options):
        ran.clear()
        out = tmp_path / "out"
        reproduce_table4.main(
            ["--data", str(corpus), "--budget", "smoke", "--out", str(out), "--stride", "16",
             *options]
        )  # fmt: skip
        return out, list(ran)

    return reproduce


class FinishedProcess:
    def wait(self):
        return 0


def test_trains_scores_and_reports_once(tiny, corpus):
    names = ["short", "long_from_short", "long_butterfly", "short_documents"]
    out, ran = tiny("--models", *names)
    trained = [command for command in ran if command[0] == "train.py"]
    assert len(trained) == 2 * 5  # two seeds, and long comes along

    result = json.loads((out / "table4.json").read_text())
    assert result["environment"]["command"].startswith("python -m")
    (table,) = result["rows"].values()
    assert [row["label"] for row in table] == [
        "short", "long", "long_butterfly", "long_from_short", "short_documents",
    ]  # fmt: skip
    assert all(row["seeds"] == 2 for row in table)
    same = [row for row in table if row["label"] != "long_from_short"]
    assert {row["tokens"] for row in same} == {20 * 256}
    # what the short model took counts for the one that it was extended to
    (extended,) = (row for row in table if row["label"] == "long_from_short")
    last = [
        [read_metrics(out / f"{name}_seed{seed}")[-1] for seed in (1, 2)]
        for name in ("short", "long_from_short")
    ]
    assert extended["tokens"] == sum(records[0]["tokens"] for records in last)
    assert extended["gpu_hours"] == pytest.approx(
        sum(record["gpu_hours"] for records in last for record in records) / 2
    )
    assert len({row["scored_tokens"] for row in table}) == 1
    for row in table:
        assert row["perplexity"] == pytest.approx(math.exp(row["nats"]))
    assert table[0]["difference"] is None
    gap = table[1]["difference"]
    assert gap["nats"] == pytest.approx(table[1]["nats"] - table[0]["nats"])
    assert gap["interval"][0] < gap["nats"] < gap["interval"][1]

    text = (out / "table4.md").read_text()
    assert text == markdown(result)
    assert "| FlashAttention, 4K | 17.5 | 3.6 |" in text
    (there,) = read_starts(out / "long_seed2")
    assert there["from_step"] == 0 and f"torch {there['torch']}, triton" in text
    assert text.endswith(f"commit {there['commit']}.\n")
    assert f"| long | 2 | 0M | {table[1]['tokens_per_s']:,.0f} |" in text
    assert (out / "table4.png").stat().st_size > 10_000
    assert (out / f"evaluation_{corpus.name}" / "report.md").exists()

    # the extension had the time that was left, and went on from the short model's weights
    begun = load_config([str(out / "long_from_short_seed2" / "config.yaml")])
    assert begun.run.init_from == str(out / "short_seed2")
    hours = [read_metrics(out / f"{name}_seed1")[-1]["gpu_hours"] for name in ("short", "long")]
    affordable = (hours[1] - hours[0]) / (hours[1] / 20)
    assert begun.optim.max_steps == max(10, 10 * round(affordable / 10))

    _, ran = tiny("--models", *names)
    assert [command for command in ran if command[0] == "train.py"] == []
    _, ran = tiny("--models", "short", "long", "--report-only")
    assert ran == []


def test_curves_are_means_over_seeds(tiny):
    out, _ = tiny("--models", "short")
    result = json.loads((out / "table4.json").read_text())
    seeds = [
        [r["val_loss"] for r in read_metrics(out / f"short_seed{seed}") if "val_loss" in r]
        for seed in (1, 2)
    ]
    curve = [point["val_loss"] for point in result["curves"]["short"]]
    assert curve == pytest.approx([sum(pair) / 2 for pair in zip(*seeds, strict=True)])
    assert len(curve) >= 2


def test_machines_share_the_seeds(tiny, tmp_path):
    names = ["--models", "short", "long_from_short"]
    with pytest.raises(SystemExit):  # argparse: one or the other
        tiny(*names, "--only", "*_seed1", "--report-only")
    with pytest.raises(ValueError, match=r"leaves out long_seed1, short_seed1, which others need"):
        tiny(*names, "--only", "*_seed2")
    with pytest.raises(
        ValueError, match=r"--only=\*_seed3 matches none .*: long_seed1, short_seed1"
    ):
        tiny(*names, "--only", "*_seed1", "*_seed3")
    out, _ = tiny(*names, "--only", "*_seed1")
    one_machine = tmp_path / "one_machine"
    out.rename(one_machine)
    with pytest.raises(ValueError, match=r"leaves out long_seed1, short_seed1, .* in .*sums will"):
        tiny(*names, "--only", "*_seed2")
    kept = shutil.copytree(one_machine / "sums", out / "sums")  # tells the times of seed 1
    with pytest.raises(ValueError, match="leaves out short_seed1, which others need: copy the fo"):
        tiny(*names, "--only", "long_from_short_seed1")  # for its weights
    (next(iter(kept.iterdir())) / "long_from_short_seed1.npz").unlink()
    out, ran = tiny(*names, "--only", "long_seed2", "*_seed2")
    folders = [word for words in ran for word in words if word.startswith("run.out_dir")]
    assert folders == [
        f"run.out_dir={out / name}_seed2" for name in ("long", "short", "long_from_short")
    ]
    begun = [
        load_config([str(folder / "config.yaml")])
        for folder in (one_machine / "long_from_short_seed1", out / "long_from_short_seed2")
    ]
    assert begun[0].optim.max_steps == begun[1].optim.max_steps

    both = tmp_path / "both"
    for folder in (one_machine, out):
        shutil.copytree(folder / "sums", both, dirs_exist_ok=True)
    shutil.rmtree(out)
    _, ran = tiny(*names, "--report-only", "--sums", str(both))
    assert ran == []
    (table,) = json.loads((out / "table4.json").read_text())["rows"].values()
    assert {row["label"]: row["seeds"] for row in table} == {
        "short": 2, "long": 2, "long_from_short": 2,
    }  # fmt: skip


def test_who_stops_it_is_told_how_to_go_on(tiny, monkeypatch, capsys):
    def stop(*_):
        raise SystemExit(143)

    monkeypatch.setattr(reproduce_table4, "run_tasks", stop)
    with pytest.raises(SystemExit, match="143"):
        tiny("--models", "short")
    assert capsys.readouterr().err == "stopped: the same command goes on from here\n"


def test_nothing_is_finished(tiny):
    with pytest.raises(ValueError, match=r"sums holds no run to report on \(not trained and sco"):
        tiny("--models", "short", "--report-only")


def report_only(tiny, monkeypatch, *names):
    """Labels, and seeds of each, of a report for which nothing may be trained or scored."""

    def fail(*_, **__):
        raise AssertionError("trained or scored")

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "token_losses", fail)
        patch.setattr(evaluate.Run, "model", property(fail))
        patch.setattr("scripts.gpu_pool._start", fail)
        patch.setattr(reproduce_table4, "write_report", lambda *_: None)  # pictures take seconds
        patch.setattr("scripts.table4_report.draw", lambda *_: None)
        out, _ = tiny("--models", *names, "--report-only")
    result = json.loads((out / "table4.json").read_text())
    (table,) = result["rows"].values()
    assert list(result["curves"]) == [row["label"] for row in table]
    return {row["label"]: row["seeds"] for row in table}, table


def test_a_report_on_a_part_of_the_sweep_scores_nothing(tiny, monkeypatch, capsys, corpus):
    names = ["short", "long"]
    out, _ = tiny("--models", *names)
    sums = out / "sums" / corpus.name
    capsys.readouterr()
    seeds, complete = report_only(tiny, monkeypatch, *names)
    assert seeds == {"short": 2, "long": 2}
    assert "not in the report" not in capsys.readouterr().out

    (sums / "long_seed1.npz").unlink()
    seeds, table = report_only(tiny, monkeypatch, *names)
    assert seeds == {"short": 2, "long": 1}
    assert "not in the report: not trained and scored: long_seed1\n" in capsys.readouterr().out
    assert table[0] == complete[0] and table[1]["nats"] != complete[1]["nats"]

    with pytest.raises(ValueError, match="not scored as these --models and --stride ask for: sh"):
        report_only(tiny, monkeypatch, "short")  # whose windows begin earlier without the long one
    shutil.rmtree(out / "short_seed2")  # of a run, the sums alone are needed
    assert report_only(tiny, monkeypatch, *names)[0] == {"short": 2, "long": 1}

    _, ran = tiny("--models", *names)  # short_seed2 anew; long_seed1 has all of its losses
    assert [words[0] for words in ran].count("train.py") == 1
    seeds, table = report_only(tiny, monkeypatch, *names)
    assert seeds == {"short": 2, "long": 2}
    assert [row["nats"] for row in table] == [row["nats"] for row in complete]


def test_a_run_that_goes_on_is_not_reported_before_its_end(tiny, monkeypatch, corpus, capsys):
    names = ["short", "long"]
    out, _ = tiny("--models", *names)
    _, complete = report_only(tiny, monkeypatch, *names)
    path = out / "sums" / corpus.name / "short_seed2.npz"
    scored, text = read_scored(path)
    half = replace(scored, about=scored.about | {"step": 10})
    write_scored(half, text, out / "sums")
    assert report_only(tiny, monkeypatch, *names)[0] == {"short": 1, "long": 2}
    assert "scored before it was finished: short_seed2\n" in capsys.readouterr().out
    other = replace(scored.config, optim=replace(scored.config.optim, lr=7.0))
    write_scored(replace(scored, config=other), text, out / "sums")
    with pytest.raises(ValueError, match=r"short_seed2.npz holds .*: optim.lr is 7.0 there and"):
        report_only(tiny, monkeypatch, *names)
    write_scored(scored, replace(text, sha256="0"), out / "sums")
    assert report_only(tiny, monkeypatch, *names)[0] == {"short": 1, "long": 2}
    said = capsys.readouterr().out
    assert "scored on another text that is called shards: short_seed2\n" in said
    more = replace(next(iter(scored.sums)), stride=5, history=9, first=70)
    sums = {more: scored.sums[next(iter(scored.sums))], **scored.sums}
    write_scored(replace(scored, sums=sums), text, out / "sums")  # what no other was scored by
    _, table = report_only(tiny, monkeypatch, *names)
    assert table == complete


def test_seeds_of_other_steps_are_refused(tiny, monkeypatch, corpus):
    names = ["short", "long_from_short"]
    out, _ = tiny("--models", *names)
    scored, text = read_scored(out / "sums" / corpus.name / "long_from_short_seed2.npz")
    step = scored.config.optim.max_steps + 10
    other = replace(scored.config, optim=replace(scored.config.optim, max_steps=step))
    evaluations = [r | {"step": step} for r in scored.about["evaluations"]]
    about = scored.about | {"step": step, "evaluations": evaluations}
    write_scored(replace(scored, config=other, about=about), text, out / "sums")
    with pytest.raises(ValueError, match=rf"seed2.npz was trained for {step} steps, and another"):
        report_only(tiny, monkeypatch, *names)


def test_what_is_extended_is_reported_without_its_first_part_but_not_without_its_cost(
    tiny, monkeypatch, corpus, capsys
):
    names = ["short", "short_then_long"]
    out, _ = tiny("--models", *names)
    sums = out / "sums" / corpus.name
    seeds, table = report_only(tiny, monkeypatch, *names)
    assert seeds == {"short": 2, "short_then_long": 2}
    (extended,) = (row for row in table if row["label"] == "short_then_long")
    assert extended["tokens"] == 20 * 256 + 10 * 256

    for seed in (1, 2):
        (sums / f"short_seed{seed}.npz").unlink()
    seeds, (alone,) = report_only(tiny, monkeypatch, *names)
    assert seeds == {"short_then_long": 2}
    assert (alone["tokens"], alone["gpu_hours"]) == (extended["tokens"], extended["gpu_hours"])

    scored, text = read_scored(sums / "short_then_long_seed1.npz")
    write_scored(replace(scored, about=scored.about | {"before": None}), text, out / "sums")
    assert report_only(tiny, monkeypatch, *names)[0] == {"short_then_long": 1}
    assert "took whose weights it starts with: short_then_long_seed1\n" in capsys.readouterr().out


def test_corpora_of_one_name_are_refused_before_anything_is_trained(tiny, corpus, tmp_path):
    elsewhere = shutil.copytree(corpus, tmp_path / corpus.name)
    with pytest.raises(ValueError, match="are both called shards"):
        tiny("--models", "short", "--score-on", str(corpus), str(elsewhere))
    assert not (tmp_path / "out").exists()


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
    """Lets the training of some runs fail; returns a function that is told which."""

    class FailedProcess:
        def wait(self):
            return 1

    run_here = gpu_pool._start

    def let_fail(name):
        def run_some(command, *rest):
            failing = "train.py" in command and any(name in word for word in command)
            return FailedProcess() if failing else run_here(command, *rest)

        monkeypatch.setattr("scripts.gpu_pool._start", run_some)

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
        tiny(*names)
    (table,) = json.loads((out / "table4.json").read_text())["rows"].values()
    assert [row["label"] for row in table] == ["short"]


def test_strides_that_not_all_contexts_slide_by(tiny):
    out, _ = tiny("--models", "short", "long", "--seeds", "1", "--stride", "16", "48")
    report = json.loads((out / "evaluation_shards" / "evaluation.json").read_text())
    assert len({row["tokens"] for row in report["strided"]}) == 1
    assert {row["stride"] for row in report["strided"]} == {16, 48}


def test_corpora_of_other_trainings_are_not_mixed(tiny, monkeypatch, corpus, other_corpus, capsys):
    on_both = ("--score-on", str(corpus), str(other_corpus))
    out, _ = tiny("--models", "short", *on_both)
    path = out / "sums" / other_corpus.name / "short_seed1.npz"
    scored, text = read_scored(path)
    write_scored(replace(scored, about=scored.about | {"gpu_hours": 9.0}), text, out / "sums")
    tiny("--models", "short", *on_both, "--report-only")
    said = capsys.readouterr().out
    assert "scored on one text, trained anew, and scored on another: short_seed1\n" in said


def test_what_cannot_be_scored_is_refused_before_training(tiny, corpus, tmp_path):
    with pytest.raises(ValueError, match=r"--stride=512 is longer than a context of 32"):
        tiny("--models", "short", "--stride", "512")
    other = tmp_path / "other"
    shutil.copytree(corpus, other)
    manifest = other / "manifest.json"
    values = json.loads(manifest.read_text())
    values["tokenizer"]["sha256"] = "0123"
    manifest.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"--score-on .*other was made with .* sha256=0123"):
        tiny("--models", "short", "--score-on", str(other))
    assert not (tmp_path / "out").exists()

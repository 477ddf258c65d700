"""Runs on several corpora."""

import json
import re
import shutil

import pytest

from tests.training_runs import losses, stop_after
from training.metrics import read_metrics


def mix(path, weight=0.5) -> str:
    return "data.mix=" + json.dumps([{"path": str(path), "weight": weight}]).replace('"', "")


def test_a_mixture_trains_resumes_and_reports_each_loss(
    run, other_corpus, tmp_path, capsys
) -> None:
    whole = run(mix(other_corpus), f"run.out_dir={tmp_path / 'whole'}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.Trainer.record", stop_after(5))
        with pytest.raises(KeyboardInterrupt):
            run(mix(other_corpus))
    assert run(mix(other_corpus)) == whole
    assert losses(run.out_dir) == losses(tmp_path / "whole")
    alone = tmp_path / "alone"
    run(f"run.out_dir={alone}")
    assert losses(alone) != losses(run.out_dir)
    said = capsys.readouterr().out
    assert re.search(r"tokens of shards \(66\.7%\): .* epochs", said)
    assert re.search(r"tokens of birds \(33\.3%\): .* epochs", said)
    evaluation = [r for r in read_metrics(run.out_dir) if "val_loss" in r][-1]
    assert evaluation["val_loss_birds"] > 0
    assert evaluation["val_loss_birds"] != evaluation["val_loss"]


def test_resuming_with_another_mixture_is_refused(run, other_corpus) -> None:
    run(mix(other_corpus), "optim.max_steps=4")
    with pytest.raises(ValueError, match=r"data\.mix"):
        run(mix(other_corpus, 0.25))
    with pytest.raises(ValueError, match=r"data\.mix"):
        run()


def test_invalid_mixtures_are_refused(run, corpus, other_corpus, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        run(mix(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="is in data.path and data.mix more than once"):
        run(mix(corpus))
    with pytest.raises(ValueError, match=r"data\.mix\[\]\.weight=-1.0 must be a finite number"):
        run(mix(other_corpus, -1))
    with pytest.raises(ValueError, match="data.weight=2.0 has no effect without data.mix"):
        run("data.weight=2")
    same_name = tmp_path / "other" / corpus.name
    shutil.copytree(other_corpus, same_name)
    with pytest.raises(ValueError, match="must have different folder names, which identify them"):
        run(mix(same_name))


def test_another_tokenizer_is_refused(run, tmp_path) -> None:
    from data.text.prepare import prepare
    from data.text.sources import open_source

    (tmp_path / "text.txt").write_text("a b c d e f g h. " * 400)
    (tmp_path / "val.txt").write_text("a b c d e f g h. " * 40)
    source = open_source([str(tmp_path / "text.txt")], val=[str(tmp_path / "val.txt")])
    prepare(source, tmp_path / "letters", train_bpe=260)
    with pytest.raises(ValueError, match="must have that of .*Prepare it with --token"):
        run(mix(tmp_path / "letters"))

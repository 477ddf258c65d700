"""LongPPL of tiny runs against a computation by hand: share, losses, sums, intervals."""

import math
import shutil

import numpy as np
import pytest

from evaluation import key_tokens
from evaluation.key_tokens import read_key_tokens
from evaluation.report import markdown
from evaluation.statistics import paired_half_width
from evaluation.sums import read_scored
from evaluation.windows import Scoring
from scripts import evaluate
from tests.evaluation.key_tokens_by_hand import (
    CONTEXT,
    GAIN,
    LOSS,
    choose_by_hand,
    document_means,
    losses_by_hand,
)
from tests.evaluation.known_losses import LONG, SHORT, find
from tests.training_runs import call_on_two_processes


@pytest.mark.slow
def test_another_run_chooses(train, result_of, stream, tmp_path, monkeypatch):
    """Share, means, sums by document and the interval of a difference against a brute force."""
    runs = {
        label: [train(f"{label}_seed{n}", *options, f"run.seed={n}", steps=8) for n in (1, 2)]
        for label, options in (("short", ()), ("long", (CONTEXT,)))
    }
    chooser = train("chooser_seed3", CONTEXT, "run.seed=3", steps=8)
    folders = [folder for pair in runs.values() for folder in pair]
    is_key = choose_by_hand(monkeypatch, chooser, stream)
    n_counted = (len(stream) - 1 - 64) // 8 * 8
    result = result_of(*folders, "--key-tokens", chooser, "--out", tmp_path / "out")
    assert 20 < is_key.sum() < n_counted / 2
    about = result["key_tokens"]
    assert (about["tokens"], about["of_tokens"]) == (is_key.sum(), n_counted)
    assert (about["chooser"], about["long"], about["short"]) == ("chooser_seed3", 64, 32)
    thresholds = key_tokens.MIN_GAIN, key_tokens.MAX_LOSS
    assert (about["min_gain"], about["max_loss"], about["missing"]) == (*thresholds, [])

    means, sums = {}, {}
    for label, history in (("short", 32), ("long", 64)):
        losses = [
            losses_by_hand(folder, stream, history, history // 8, 64) for folder in runs[label]
        ]
        means[label] = [loss[is_key].mean() for loss in losses]
        sums[label] = document_means(np.mean(losses, axis=0), is_key, stream)
        row = find(result["as_trained_key"], label)
        assert (row["history"], row["tokens"]) == (history, is_key.sum())
        assert row["nats_of_seeds"] == pytest.approx(means[label], rel=1e-5)
        assert row["nats"] == pytest.approx(np.mean(means[label]), rel=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(np.mean(means[label])), rel=1e-4)
    cross = find(result["key"], "long", history=32)
    with_short = [losses_by_hand(folder, stream, 32, 4, 64)[is_key] for folder in runs["long"]]
    assert cross["nats"] == pytest.approx(np.mean(with_short), rel=1e-5)

    # sums by document, from the files
    command = [*map(str, (*folders, "--key-tokens", chooser, "--sums", tmp_path / "sums"))]
    evaluate.main([*command, "--device", "cpu"])
    for label, scoring in (("short", SHORT), ("long", LONG)):
        stride = Scoring(history=scoring.history, stride=scoring.history // 8, first=64)
        files = [tmp_path / "sums" / "shards" / f"{label}_seed{n}.npz" for n in (1, 2)]
        saved = [read_scored(path)[0].key.sums[stride] for path in files]
        assert (saved[0].tokens.sum(axis=1) == sums[label][1]).all()
        nats = np.mean([s.nats.sum(axis=1) for s in saved], axis=0)
        np.testing.assert_allclose(nats, sums[label][0], rtol=1e-5)

    # a bootstrap of its own; 8 documents of about equal numbers of key tokens
    difference = find(result["as_trained_key"], "long")["difference"]
    gaps = np.subtract(means["long"], means["short"])
    assert difference["nats"] == pytest.approx(gaps.mean(), abs=1e-6)
    half = paired_half_width(gaps)
    assert difference["half_width_of_seeds"] == pytest.approx(half, rel=1e-3)
    rng, drawn = np.random.default_rng(5), []
    for _ in range(20_000):
        documents = rng.integers(len(stream.document_starts), size=len(stream.document_starts))
        long, short = (sums[label][:, documents].sum(axis=1) for label in ("long", "short"))
        drawn.append(long[0] / long[1] - short[0] / short[1])
    low, high = difference["interval_of_documents"]
    spread = (np.quantile(drawn, 0.975) - np.quantile(drawn, 0.025)) / 2
    assert 1 < (high - low) / 2 / spread < 1.7  # widened, as there are few documents
    assert (high + low) / 2 == pytest.approx(np.mean(drawn), abs=spread / 3)
    low, high = (math.hypot(end - gaps.mean(), half) for end in (low, high))
    expected = [gaps.mean() - low, gaps.mean() + high]
    assert difference["interval"] == pytest.approx(expected, abs=1e-6)

    report = markdown(result)
    share = f"{is_key.sum()} of {n_counted} tokens ({100 * is_key.sum() / n_counted:.2g}%) are key"
    assert report.count(share) == 2  # in the summary, and above the table
    assert "if chooser_seed3 sees 64 instead of 32 tokens" in report
    assert f"| {math.exp(np.mean(means['long'])):.2f} |" in report


def test_one_of_the_seeds_chooses_by_default(train, result_of, stream, monkeypatch):
    folders = {
        f"{label}_seed{n}": train(f"{label}_seed{n}", *options, f"run.seed={n}", steps=4)
        for label, options in (("short", ()), ("long", (CONTEXT,)))
        for n in (1, 2)
    }
    is_key = choose_by_hand(monkeypatch, folders["long_seed2"], stream)
    result = result_of(*folders.values())
    about = result["key_tokens"]
    assert (about["chooser"], about["tokens"]) == ("long_seed2", is_key.sum())
    assert about["missing"] == ["short_seed2", "long_seed2"]
    for label, history in (("short", 32), ("long", 64)):
        row = find(result["as_trained_key"], label)
        losses = losses_by_hand(folders[f"{label}_seed1"], stream, history, history // 8, 64)
        assert row["nats_of_seeds"] == pytest.approx([losses[is_key].mean()], rel=1e-5)
        assert len(find(result["as_trained"], label)["nats_of_seeds"]) == 2
    assert "Not scored on them: short_seed2, long_seed2." in markdown(result)

    # with one context only, the short history is a quarter of it
    is_key = choose_by_hand(monkeypatch, folders["long_seed2"], stream, short=16)
    alone = result_of(folders["long_seed1"], folders["long_seed2"])["key_tokens"]
    assert (alone["short"], alone["tokens"]) == (16, is_key.sum())

    # one seed each: no run can choose
    result = result_of(folders["short_seed1"], folders["long_seed1"])
    assert (result["key_tokens"], result["key"]) == (None, [])
    remedy = "Pass another seed of a model with the longest context (--key-tokens RUN)"
    assert remedy in markdown(result)
    assert "LongPPL" not in markdown(result_of(folders["short_seed1"], "--modes", "chunk"))


def test_only_tokens_that_the_chooser_could_choose_count(train, result_of, stream, monkeypatch):
    """Its windows of 128 tokens score positions 113 to 960, and those of the runs 65 to 960."""
    short, long = train("short", steps=4), train("long", CONTEXT, steps=4)
    chooser = train("chooser", "model.context_length=128", "run.seed=3", steps=8)
    is_key = choose_by_hand(monkeypatch, chooser, stream, 128, 32, first=112)
    result = result_of(short, long, "--key-tokens", chooser)
    about = result["key_tokens"]
    assert find(result["as_trained"], "long")["tokens"] == 896
    assert (about["of_tokens"], about["long"], about["short"]) == (848, 128, 32)
    assert 20 < is_key.sum() == about["tokens"] == find(result["as_trained_key"], "long")["tokens"]


def test_no_default_if_the_short_history_is_too_long(train, result_of, capsys):
    runs = [train(f"run_seed{n}", f"run.seed={n}", steps=1) for n in (1, 2)]
    assert result_of(*runs, "--near", 0)["key_tokens"] is None
    assert "skipping LongPPL: --near=0 is the short history" in capsys.readouterr().out


def test_the_summary_says_why_there_is_no_long_ppl(train, tmp_path, capsys):
    short, long, other = (
        train("short", steps=1),
        train("long", CONTEXT, steps=1),
        train("other", CONTEXT, "run.seed=5", steps=1),
    )

    def printed(*arguments):
        capsys.readouterr()
        evaluate.main([*map(str, arguments), "--device", "cpu", "--out", str(tmp_path / "out")])
        lines = capsys.readouterr().out.splitlines()
        report = (tmp_path / "out" / "report.md").read_text()
        found = [line for line in lines if line.startswith("LongPPL: ")]
        assert all(report.splitlines().count(line) == 1 for line in found)
        return found

    (line,) = printed(short, long)
    assert line.startswith("LongPPL: not computed, as no run chose key tokens. Pass another seed")
    (line,) = printed(short, long, "--key-tokens", other)  # by the paper's thresholds
    assert line.startswith("LongPPL: not computed, as there are no key tokens. 0 of 896 tokens (0%")
    assert "if other sees 64 instead of 32 tokens before them. Choose them with a shorter" in line
    assert printed(short, "--modes", "chunk") == []


def test_a_file_without_key_tokens_is_not_written(train, tmp_path):
    run, file = train("run", CONTEXT, steps=1), tmp_path / "key.npz"
    message = (
        r"run must choose at least one key token, but it found 0 key tokens of shards, 0.00% of "
        r"\d+: .* by more than 2 nats, to less than 2, with 64 instead of 8 tokens .* --near"
    )
    with pytest.raises(ValueError, match=message):
        evaluate.main(
            [*map(str, (run, "--near", 8, "--device", "cpu", "--write-key-tokens", file))]
        )
    assert not file.exists()


def test_no_key_token_at_all(train, result_of):
    short, long, other = (
        train("short"),
        train("long", CONTEXT),
        train("other", CONTEXT, "run.seed=5"),
    )
    result = result_of(short, long, "--key-tokens", other)  # by the paper's thresholds
    assert (result["key_tokens"]["tokens"], result["key"]) == (0, [])
    assert result["key_tokens"]["min_gain"] == result["key_tokens"]["max_loss"] == 2.0
    assert "0 of 896 tokens (0%) are key tokens" in markdown(result)


def write_one_choice(arguments):
    """Body of each process in the test below."""
    key_tokens.MIN_GAIN, key_tokens.MAX_LOSS = GAIN, LOSS
    evaluate.main(arguments)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_choose_what_one_chooses(train, stream, tmp_path, small_gains):
    chooser = train("chooser", CONTEXT, "run.seed=3", steps=4)
    short, long = train("short", steps=2), train("long", CONTEXT, steps=2)
    command = [
        str(chooser),
        "--near",
        "32",
        "--device",
        "cpu",
        "--write-key-tokens",
        str(tmp_path / "two.npz"),
    ]
    ends = call_on_two_processes(tmp_path, write_one_choice, command)
    assert [status for status, _ in ends] == [0, 0], ends
    shutil.rmtree(chooser / "scores")
    evaluate.main([*command[:-1], str(tmp_path / "one.npz")])
    one, two = (read_key_tokens(tmp_path / f"{name}.npz") for name in ("one", "two"))
    assert one.facts() == two.facts()
    chosen = [key.of(stream).is_key for key in (one, two)]
    assert chosen[0].sum() > 20
    assert (chosen[0] != chosen[1]).sum() <= 1  # one may be at a threshold

    for folder in (short, long, chooser):
        shutil.rmtree(folder / "scores", ignore_errors=True)
    runs = [str(short), str(long), "--key-tokens"]
    more = ["--device", "cpu", "--sums"]
    ends = call_on_two_processes(
        tmp_path, write_one_choice, [*runs, str(chooser), *more, str(tmp_path / "sums_two")]
    )
    assert [status for status, _ in ends] == [0, 0], ends
    evaluate.main([*runs, str(tmp_path / "two.npz"), *more, str(tmp_path / "sums_one")])
    for folder in (short, long):
        one, two = (
            read_scored(tmp_path / f"sums_{n}" / "shards" / f"{folder.name}.npz")[0].key
            for n in ("one", "two")
        )
        assert one.about["tokens"] == two.about["tokens"] > 20
        assert one.sums.keys() == two.sums.keys()
        for scoring in one.sums:
            nats = [key.sums[scoring].nats for key in (one, two)]
            np.testing.assert_allclose(*nats, rtol=1e-5)

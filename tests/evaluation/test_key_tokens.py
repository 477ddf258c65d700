"""Key tokens and LongPPL: who chooses, which tokens, and sums and differences on them."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.text.shards import TokenStream
from evaluation import key_tokens
from evaluation.key_tokens import default_chooser, left_out, read_key_tokens, write_key_tokens
from evaluation.plan import Plan
from evaluation.report import markdown
from evaluation.runs import labels, open_run
from evaluation.statistics import paired_half_width
from evaluation.sums import read_scored, write_scored
from evaluation.tables import compare, tabulate
from evaluation.windows import Scoring
from scripts import evaluate
from tests.evaluation.known_losses import added_up, find
from tests.training_runs import call_on_two_processes

LONG = "model.context_length=64"
GAIN, LOSS = 0.002, 4.5  # models that are hardly trained gain little from a longer history


@pytest.fixture
def small_gains(monkeypatch):
    """Lower the thresholds, so that some tokens are key tokens of hardly trained models."""
    monkeypatch.setattr(key_tokens, "MIN_GAIN", GAIN)
    monkeypatch.setattr(key_tokens, "MAX_LOSS", LOSS)


def losses_by_hand(folder, stream, history, stride, first):
    """(n_tokens,) losses, window by window, NaN for tokens that are not scored."""
    run, text = open_run(folder), torch.from_numpy(stream.read(0, len(stream)))
    losses = np.full(len(text), np.nan)
    for end in range(first + stride, len(text), stride):
        window, targets = text[end - history : end], text[end - history + 1 : end + 1]
        with torch.no_grad():
            log_p = run.model(window[None])[0].log_softmax(-1)
        scored = slice(end - stride + 1, end + 1)
        losses[scored] = -log_p[range(history), targets][-stride:].numpy()
    return losses


def key_by_hand(folder, stream, long=64, short=32):
    """(n_tokens,) bool: key tokens from log-probabilities, as the paper defines them."""
    with_long, with_short = (
        -losses_by_hand(folder, stream, history, history // 8, 64) for history in (long, short)
    )
    return np.array(
        [
            a - b > GAIN and a > -LOSS
            for a, b in zip(with_long.tolist(), with_short.tolist(), strict=True)
        ]
    )


def document_means(values, is_key, stream):
    """Sum and number of key tokens of each document."""
    ends = [*stream.document_starts[1:].tolist(), len(stream)]
    rows = []
    for start, end in zip(stream.document_starts.tolist(), ends, strict=True):
        kept = values[start:end][is_key[start:end]]
        rows.append((kept.sum(), len(kept)))
    return np.array(rows).T


def test_another_run_chooses(train, result_of, corpus, tmp_path, small_gains):
    """Share, means, sums by document and the interval of a difference against a brute force."""
    runs = {
        label: [train(f"{label}_seed{n}", *options, f"run.seed={n}", steps=8) for n in (1, 2)]
        for label, options in (("short", ()), ("long", (LONG,)))
    }
    chooser = train("chooser_seed3", LONG, "run.seed=3", steps=8)
    folders = [folder for pair in runs.values() for folder in pair]
    result = result_of(*folders, "--key-tokens", chooser, "--out", tmp_path / "out")
    stream = TokenStream(corpus, "val")
    is_key, n_counted = key_by_hand(chooser, stream), (len(stream) - 1 - 64) // 8 * 8
    assert 20 < is_key.sum() < n_counted / 2
    about = result["key_tokens"]
    assert (about["tokens"], about["of_tokens"]) == (is_key.sum(), n_counted)
    assert (about["chooser"], about["long"], about["short"]) == ("chooser_seed3", 64, 32)
    assert about["missing"] == []

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


def test_one_of_the_seeds_chooses_by_default(train, result_of, corpus, small_gains):
    folders = {
        f"{label}_seed{n}": train(f"{label}_seed{n}", *options, f"run.seed={n}", steps=4)
        for label, options in (("short", ()), ("long", (LONG,)))
        for n in (1, 2)
    }
    stream = TokenStream(corpus, "val")
    result = result_of(*folders.values())
    is_key = key_by_hand(folders["long_seed2"], stream)
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
    alone = result_of(folders["long_seed1"], folders["long_seed2"])["key_tokens"]
    is_key = key_by_hand(folders["long_seed2"], stream, short=16)
    assert (alone["short"], alone["tokens"]) == (16, is_key.sum())

    # one seed each: no run can choose
    result = result_of(folders["short_seed1"], folders["long_seed1"])
    assert (result["key_tokens"], result["key"]) == (None, [])
    assert "Pass another seed of a model with the longest context (--key-tokens RUN)" in markdown(
        result
    )
    assert "LongPPL" not in markdown(result_of(folders["short_seed1"], "--modes", "chunk"))


@pytest.mark.parametrize(
    ("names", "chooser", "omitted"),
    [
        ("a1", None, ""),
        ("a1 a2", "a2", "a2"),
        ("A1 A2 a1 a2 a3", "A2", "A2 a2"),  # the longest context, though a3 would leave out less
        ("A1 A2 A3 a1 a2", "A3", "A3"),
        ("A1 A2 a2", "A1", "A1"),  # a keeps its only run
        ("A1 a1 a2", None, ""),
        ("A1 A2 a1 b2", None, ""),
        ("A1 B1 B2", "B2", "B2"),  # A has no other seed
        ("B1 B2 A1 A2", "B2", "B2 A2"),  # the first on the command line
    ],
)
def test_who_chooses_by_default(opened, names, chooser, omitted):
    """Capital letters have the longest context."""
    runs = [
        opened(
            f"{'long' if name[0].isupper() else 'short'}_{name[0]}_seed{name[1]}",
            f"model.context_length={64 if name[0].isupper() else 32}",
            f"run.seed={name[1]}",
            f"model.n_head={2 if name[0] in 'aA' else 1}",
        )
        for name in names.split()
    ]
    found = default_chooser(runs, labels(runs))
    assert (found and found.folder.name[-7] + found.folder.name[-1]) == chooser
    out = left_out(runs, found) if found else set()
    kept = [n for n, run in zip(names.split(), runs, strict=True) if run.folder in out]
    assert kept == omitted.split()


def test_a_copy_of_the_chooser_is_left_out(opened):
    runs = [
        opened("a_seed1", "run.seed=7"),
        opened("a_seed2", "run.seed=8"),
        opened("b_seed5", "run.seed=9"),
        opened("copy_of_a_seed4", "run.seed=8", "optim.max_steps=77"),
    ]
    assert left_out(runs, runs[1]) == {runs[1].folder, runs[3].folder}
    assert left_out([replace(run, text_tokens=n) for n, run in enumerate(runs)], runs[1]) == {
        runs[1].folder, runs[3].folder
    }  # fmt: skip
    told = [replace(run, text_tokens=n) for n, run in enumerate(runs)]
    assert left_out(told, told[1]) == {runs[1].folder}  # trained on another text


def test_a_file_gives_what_its_run_gives(train, result_of, corpus, other_corpus, tmp_path,
                                         small_gains, capsys):  # fmt: skip
    short, long = train("short", steps=4), train("long", LONG, steps=4)
    chooser = train("chooser", LONG, "run.seed=3", steps=4)
    corpora = ("--data", corpus, other_corpus)
    near = ("--near", 32, "--device", "cpu")
    file = tmp_path / "new" / "key.npz"
    evaluate.main([*map(str, (chooser, *corpora, *near, "--write-key-tokens", file))])
    assert f"wrote {file}" in capsys.readouterr().out
    assert file.stat().st_size < 10_000
    for data in corpora[1:]:
        by_run = result_of(short, long, "--data", data, "--key-tokens", chooser)
        by_file = result_of(short, long, "--data", data, "--key-tokens", file)
        assert by_run == by_file
        assert by_run["key_tokens"]["tokens"] > 0
        # runs that are scored one by one
        for folder in (short, long):
            alone = ("--first", 64, "--histories", 32, 64, "--near", 32)
            sums = ("--key-tokens", file, "--sums", tmp_path / "sums", "--data", data)
            result_free = [*map(str, (folder, *alone, *sums, "--device", "cpu"))]
            evaluate.main(result_free)
        files = [tmp_path / "sums" / data.name / f"{run.name}.npz" for run in (short, long)]
        runs, texts = zip(*map(read_scored, files), strict=True)
        apart = tabulate(runs, texts[0])
        assert apart["key_tokens"] == by_run["key_tokens"]
        assert apart["as_trained_key"] == by_run["as_trained_key"]
        (pair,) = compare(runs, [("long", "short")])
        assert pair["key"] == find(by_run["as_trained_key"], "long")["difference"]


def test_files_round_trip(train, stream, tmp_path, small_gains):
    chooser = train("chooser", LONG, steps=2)
    evaluate.main([str(chooser), "--device", "cpu", "--write-key-tokens", str(tmp_path / "a")])
    key = read_key_tokens(tmp_path / "a")
    write_key_tokens(key, tmp_path / "b")
    again = read_key_tokens(tmp_path / "b")
    assert again.facts() == key.facts() and again.config == key.config
    (choice,), (same,) = key.choices, again.choices
    assert np.array_equal(choice.is_key, same.is_key) and choice.is_key.dtype == bool
    assert len(choice.is_key) == len(stream) and choice.is_key.any()
    assert key.sha256(choice.text_sha256) == again.sha256(choice.text_sha256)
    # another choice has another hash
    flipped = replace(choice, is_key=~choice.is_key)
    others = [
        replace(key, choices=(flipped,)), replace(key, step=9), replace(key, min_gain=1.0),
        replace(key, short=replace(key.short, history=15)),
    ]  # fmt: skip
    assert len({k.sha256(choice.text_sha256) for k in (key, *others)}) == 5


def test_damaged_files_are_refused(train, tmp_path, small_gains):
    chooser, file = train("chooser", LONG, steps=1), tmp_path / "key.npz"
    evaluate.main([str(chooser), "--device", "cpu", "--write-key-tokens", str(file)])
    whole = file.read_bytes()
    with np.load(file) as saved:
        arrays = dict(saved)
    facts = json.loads(str(arrays["facts"]))
    broken = [
        {**arrays, "bits_0": arrays["bits_0"][:-1]},  # numpy would pad it with zeros
        {"facts": arrays["facts"]},
        {**arrays, "facts": np.array(json.dumps(facts | {"of_the_future": 1}))},
        {"losses": np.zeros(3)},
    ]
    for damaged in (b"", whole[:100], *broken):
        if isinstance(damaged, bytes):
            file.write_bytes(damaged)
        else:
            np.savez(file, **damaged)
        with pytest.raises(ValueError, match=r"--key-tokens=.*key.npz is damaged, or is not a fil"):
            read_key_tokens(file)


def test_wrong_key_tokens_are_refused(train, corpus, other_corpus, tmp_path, small_gains):
    short, long = train("short", steps=1), train("long", LONG, steps=1)
    other = train("other", LONG, "run.seed=5", steps=1)
    copy, file = shutil.copytree(long, tmp_path / "copy"), tmp_path / "key.npz"
    evaluate.main([*map(str, (long, "--near", 8, "--device", "cpu", "--write-key-tokens", file))])
    same = "has the settings and the seed of"
    for arguments, message in (
        ([short, long, "--key-tokens", long], rf"long {same} .*long, which chooses the key tokens"),
        ([short, long, "--key-tokens", file], rf"long {same} long, which chooses"),
        ([copy, "--key-tokens", long], rf"copy {same} .*long"),
        ([other, "--data", other_corpus, "--key-tokens", file], r"texts shards \(.*include .*bird"),
        ([other, "--key-tokens", short], "--near=16 .*|--near=32 .*|must be from 1 to"),
        ([other, "--key-tokens", long, "--near", 64], "--near=64 is .* must be from 1 to 63"),
        ([other, "--key-tokens", file, "--modes", "chunk"], "--key-tokens changes nothing with"),
        ([short, long, "--write-key-tokens", file], "needs the one run that chooses, not 2 runs"),
        ([long, "--write-key-tokens", tmp_path], "is a folder: name a file"),
        ([long, "--write-key-tokens", file, "--sums", tmp_path], "--sums changes nothing with"),
        ([long, "--write-key-tokens", file, "--modes", "chunk"], "--modes changes nothing with"),
    ):
        if "--key-tokens" in arguments and short in arguments[1:] and other in arguments:
            arguments = [other, "--key-tokens", short, "--near", 40]
        with pytest.raises(ValueError, match=message):
            evaluate.main([*map(str, arguments), "--device", "cpu"])
    with pytest.raises(FileNotFoundError, match="--key-tokens=.*nothing does not exist. It must"):
        evaluate.main([str(short), "--key-tokens", str(tmp_path / "nothing"), "--device", "cpu"])


def test_no_key_token_at_all(train, result_of, monkeypatch):
    short, long, other = train("short"), train("long", LONG), train("other", LONG, "run.seed=5")
    result = result_of(short, long, "--key-tokens", other)  # by the paper's thresholds
    assert (result["key_tokens"]["tokens"], result["key"]) == (0, [])
    assert result["key_tokens"]["min_gain"] == result["key_tokens"]["max_loss"] == 2.0
    assert "0 of 896 tokens (0%) are key tokens" in markdown(result)


def test_sums_on_other_key_tokens_are_not_compared(scored, stream, base, tmp_path):
    ...


@pytest.mark.distributed
def test_two_processes_choose_what_one_chooses(train, tmp_path, small_gains):
    ...

"""Key tokens: who chooses them, the files that store them, and those that are refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from evaluation.key_tokens import default_chooser, left_out, read_key_tokens, write_key_tokens
from evaluation.runs import labels
from evaluation.sums import KeySums, read_scored, write_scored
from evaluation.tables import compare, tabulate
from scripts import evaluate
from tests.evaluation.key_tokens_by_hand import (
    CONTEXT,
)
from tests.evaluation.known_losses import CHUNK_LONG, LONG, SHORT, added_up, find


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
            f"model.context_schedule=[[{64 if name[0].isupper() else 32},1]]",
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
    other_texts = [replace(run, text_tokens=n) for n, run in enumerate(runs)]
    assert left_out(other_texts, other_texts[1]) == {runs[1].folder}


def test_a_file_gives_what_its_run_gives(train, result_of, corpus, other_corpus, tmp_path,
                                         small_gains, capsys):  # fmt: skip
    short, long = train("short", steps=4), train("long", CONTEXT, steps=4)
    chooser = train("chooser", CONTEXT, "run.seed=3", steps=4)
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


def test_another_near_than_that_of_a_file(train, result_of, tmp_path, small_gains, capsys):
    """It is for controls. Without these it would change nothing."""
    run, chooser = train("run", CONTEXT), train("chooser", CONTEXT, "run.seed=3", steps=4)
    file = tmp_path / "key.npz"
    arguments = (chooser, "--near", 32, "--device", "cpu", "--write-key-tokens", file)
    evaluate.main([*map(str, arguments)])
    unused = f"--near=16 does not change the key tokens of {file}, which have a short history of 32"
    capsys.readouterr()
    for modes in ((), ("--modes", "strided", "control")):
        result = result_of(run, "--key-tokens", file, "--near", 16, *modes)
        assert f"{unused} tokens: only control uses it\n" in capsys.readouterr().out
        assert {row["near"] for row in result["control"] if row["control"] != "intact"} == {16}
        assert result["key_tokens"]["short"] == 32
    with pytest.raises(ValueError, match=f"{unused} tokens: leave --near out, or choose .*near 16"):
        result_of(run, "--key-tokens", file, "--near", 16, "--modes", "strided", "cross")
    for near in ((), ("--near", 32)):
        result_of(run, "--key-tokens", file, "--modes", "strided", *near)
    assert "--near" not in capsys.readouterr().out


def test_files_round_trip(train, stream, tmp_path, small_gains):
    chooser = train("chooser", CONTEXT, steps=4)
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
    chooser, file = train("chooser", CONTEXT, steps=4), tmp_path / "key.npz"
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
    short, long = train("short", steps=1), train("long", CONTEXT, steps=4)
    other = train("other", CONTEXT, "run.seed=5", steps=1)
    copy, file = shutil.copytree(long, tmp_path / "copy"), tmp_path / "key.npz"
    evaluate.main([*map(str, (long, "--near", 8, "--device", "cpu", "--write-key-tokens", file))])
    same = "has the settings and the seed of"
    for arguments, message in (
        ([short, long, "--key-tokens", long], rf"long {same} .*long, which chooses the key tokens"),
        ([short, long, "--key-tokens", file], rf"long {same} long, which chooses"),
        ([copy, "--key-tokens", long], rf"copy {same} .*long"),
        ([other, "--data", other_corpus, "--key-tokens", file], r"texts shards \(.*include .*bird"),
        ([other, "--key-tokens", short, "--near", 40], "--near=40 is .* from 1 to 31, below the c"),
        ([other, "--key-tokens", long, "--near", 64], "--near=64 is .* must be from 1 to 63"),
        ([other, "--key-tokens", file, "--modes", "chunk"], "--key-tokens changes nothing with"),
        ([short, long, "--write-key-tokens", file], "needs the one run that chooses, not 2 runs"),
        ([long, "--write-key-tokens", tmp_path], "is a folder: name a file"),
        ([long, "--write-key-tokens", file, "--sums", tmp_path], "--sums changes nothing with"),
        ([long, "--write-key-tokens", file, "--modes", "chunk"], "--modes changes nothing with"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate.main([*map(str, arguments), "--device", "cpu"])
    with pytest.raises(FileNotFoundError, match="--key-tokens=.*nothing does not exist. It must"):
        evaluate.main([str(short), "--key-tokens", str(tmp_path / "nothing"), "--device", "cpu"])


def test_sums_on_different_key_tokens_are_refused(scored, stream, base):
    losses = {"a": {SHORT: base, CHUNK_LONG: base}, "b": {LONG: base + 1, CHUNK_LONG: base}}
    runs, text = added_up([scored(label, of) for label, of in losses.items()], stream)
    about = {"chooser": "c_seed3", "tokens": 5, "of_tokens": 9}
    one, two = (KeySums(about={"sha256": x, **about}, sums=runs[0].sums) for x in "xy")
    (pair,) = compare([runs[0], replace(runs[1], key=one)], [("b", "a")])
    assert pair["key"] is None and pair["strided"] is not None
    result = tabulate([runs[0], replace(runs[1], key=one)], text)
    assert result["key_tokens"]["missing"] == ["a_seed1"]
    assert [row["label"] for row in result["as_trained_key"]] == ["b"]
    different = [replace(runs[0], key=two), replace(runs[1], key=one)]
    for function in (lambda: tabulate(different, text), lambda: compare(different, [("b", "a")])):
        with pytest.raises(
            ValueError, match=r"the same key tokens, .* chosen by c_seed3 \(y\), c_"
        ):
            function()


def test_a_file_of_sums_without_key_tokens_is_read(scored, stream, base, tmp_path):
    (run,), text = added_up([scored("a", {LONG: base})], stream)
    path = write_scored(run, text, tmp_path)
    facts = json.loads(str(np.load(path)["facts"]))
    assert "key" not in facts  # as in files of earlier versions
    again, _ = read_scored(path)
    assert again.key is None and tabulate([again], text)["key_tokens"] is None
    key = KeySums(
        about={"sha256": "x", "tokens": 3}, sums={LONG: run.sums[LONG], SHORT: run.sums[LONG]}
    )
    again, _ = read_scored(write_scored(replace(run, key=key), text, tmp_path))
    assert again.key.about == key.about and list(again.key.sums) == [LONG, SHORT]
    for scoring, sums in again.key.sums.items():
        assert sums.n_bytes == key.sums[scoring].n_bytes
        assert np.array_equal(sums.nats, key.sums[scoring].nats)
        assert np.array_equal(sums.tokens, key.sums[scoring].tokens)

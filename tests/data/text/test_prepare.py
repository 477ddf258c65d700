import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from data.text.documents import FileSource, StdlibSource
from data.text.prepare import prepare
from data.text.shards import Manifest, TokenStream
from data.text.tokenizer import END_OF_TEXT, load_tokenizer

SHARD_TOKENS = 500


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr("data.text.prepare._BATCH_CHARS", 300)
    monkeypatch.setattr("data.text.prepare._PIECE_CHARS", 50)


@pytest.fixture
def corpus(jsonl, texts):
    """A source with short documents, one longer than a shard, and one that holds markup."""
    documents = [*texts(150), " ", "long document " * 800, f"a{END_OF_TEXT}b", *texts(50, seed=1)]
    path = jsonl(documents)
    return lambda: FileSource([str(path)], val_ratio=0.2)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_tokens_are_those_of_each_document_and_its_end(corpus, tokenizer, tokenizer_file, tmp_path):
    out = tmp_path / "out"
    report = prepare(corpus(), out, tokenizer=str(tokenizer_file), shard_tokens=SHARD_TOKENS)
    for split in ("train", "val"):
        documents = [d.text for d in corpus().documents() if d.split == split]
        encoded = [[*tokenizer.encode(text), tokenizer.eot_id] for text in documents]
        stream = TokenStream(out, split)
        assert stream.read(0, len(stream)).tolist() == [i for ids in encoded for i in ids]
        starts = np.cumsum([0] + [len(ids) for ids in encoded])[:-1]
        assert stream.document_starts.tolist() == starts.tolist()
        info = report.manifest.splits[split]
        assert info.documents == len(documents)
        assert info.text_bytes == sum(len(text.encode()) for text in documents)
        for shard in info.shards[:-1]:
            assert shard.tokens >= SHARD_TOKENS
        lengths = np.array([len(ids) - 1 for ids in encoded])
        share = lengths[lengths > 1024].sum() / lengths.sum()
        assert report.long_document_shares[split][0] == pytest.approx(share)
    assert len(report.manifest.splits["train"].shards) > 3
    assert report.new_text_bytes == sum(i.text_bytes for i in report.manifest.splits.values())
    assert Manifest.load(out).tokenizer.sha256 == tokenizer.sha256
    assert not (out / "progress.json").exists()


@pytest.mark.parametrize("shard_tokens", [1, 77, 10**6])
def test_stopped_after_every_batch_and_resumed(corpus, tokenizer_file, tmp_path, shard_tokens):
    def run(out, on_progress=lambda counts, done: None):
        return prepare(
            corpus(),
            out,
            tokenizer=str(tokenizer_file),
            shard_tokens=shard_tokens,
            on_progress=on_progress,
        )

    class Stop(Exception):  # noqa: N818
        pass

    def stop_at(batch):
        def on_progress(counts, done):
            nonlocal batch
            batch -= 1
            if not batch:
                raise Stop

        return on_progress

    run(tmp_path / "whole")
    out = tmp_path / "out"
    stops = 0
    for batch in range(1, 1000):
        try:
            report = run(out, stop_at(batch))
        except Stop:
            stops += 1
        else:
            break
        # what a crash may leave beyond the committed state must not survive
        state = json.loads((out / "progress.json").read_text())
        number = len(state["splits"]["train"]["shards"])
        with (out / f"train_{number:05d}.bin").open("ab") as file:
            file.write(b"torn")
        (out / "progress.json.1.unfinished").write_bytes(b"torn")
    assert stops > 5
    assert contents(out) == contents(tmp_path / "whole")
    assert 0 < report.new_text_bytes <= sum(i.text_bytes for i in report.manifest.splits.values())


def test_finished_folder_is_left_alone(corpus, tokenizer_file, tmp_path):
    options = {"tokenizer": str(tokenizer_file), "shard_tokens": SHARD_TOKENS}
    prepare(corpus(), tmp_path / "out", **options)
    before = contents(tmp_path / "out")
    report = prepare(corpus(), tmp_path / "out", **options)
    assert report.new_text_bytes == 0
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_in_the_same_folder(corpus, jsonl, tokenizer_file, tmp_path, finished):
    out, options = tmp_path / "out", {"tokenizer": str(tokenizer_file), "shard_tokens": 50}

    def stop(counts, done):
        raise KeyboardInterrupt

    if finished:
        prepare(corpus(), out, **options)
    else:
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus(), out, **options, on_progress=stop)
    with pytest.raises(ValueError, match=r"shard_tokens is 50 there and 60 here"):
        prepare(corpus(), out, tokenizer=str(tokenizer_file), shard_tokens=60)
    with pytest.raises(ValueError, match=r"tokenizer\.train_bpe is None there and 300 here"):
        prepare(corpus(), out, train_bpe=300, shard_tokens=50)
    other = FileSource([str(jsonl(["x"] * 20, "other.jsonl"))], val_ratio=0.2)
    with pytest.raises(ValueError, match=r"source\.names.*choose another --out folder, or delete"):
        prepare(other, out, **options)


def test_trained_tokenizer_is_kept_for_the_next_run(corpus, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def stop(counts, done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus(), out, train_bpe=300, on_progress=stop)
    monkeypatch.setattr("data.text.prepare.train_tokenizer", None)
    manifest = prepare(corpus(), out, train_bpe=300).manifest
    assert (manifest.tokenizer.name, manifest.tokenizer.vocab_size) == ("bpe-300", 300)


def test_tokenizer_is_trained_on_a_bounded_sample_of_train(corpus, tmp_path, monkeypatch):
    sample = []
    monkeypatch.setattr("data.text.prepare.BPE_SAMPLE_CHARS", 1000)
    monkeypatch.setattr(
        "data.text.prepare.train_tokenizer", lambda texts, *_: sample.extend(texts) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        prepare(corpus(), tmp_path / "out", train_bpe=300)
    train = "".join(d.text for d in corpus().documents() if d.split == "train")
    assert "".join(sample) == train[:1000]


def test_tokenizer_changed_between_runs(corpus, tokenizer_file, tmp_path):
    out = tmp_path / "out"

    def stop(counts, done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus(), out, train_bpe=300, on_progress=stop)
    (out / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    with pytest.raises(ValueError, match=r"tokenizer\.json has sha256=.*was done with"):
        prepare(corpus(), out, train_bpe=300)


def test_committed_shard_lost_between_runs(corpus, tokenizer_file, tmp_path):
    out = tmp_path / "out"

    def stop(counts, done):
        if counts.tokens > 600:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus(), out, tokenizer=str(tokenizer_file), shard_tokens=300, on_progress=stop)
    (out / "val_00000.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"val_00000\.bin has 0 bytes, but \d+ were written"):
        prepare(corpus(), out, tokenizer=str(tokenizer_file), shard_tokens=300)


def test_no_data_and_no_validation_data(jsonl, tokenizer_file, tmp_path):
    empty = FileSource([str(jsonl([], "empty.jsonl"))])
    with pytest.raises(ValueError, match="holds no documents"):
        prepare(empty, tmp_path / "a", tokenizer=str(tokenizer_file))
    one = FileSource([str(jsonl(["only"], "one.jsonl"))])  # `open_source` would cut it
    with pytest.raises(ValueError, match=r"All 1 documents fell into train.*--val FILE"):
        prepare(one, tmp_path / "b", tokenizer=str(tokenizer_file))
    with pytest.raises(FileNotFoundError, match="not finished"):
        TokenStream(tmp_path / "b", "train")


def test_broken_document_stops_with_its_place(jsonl, tokenizer_file, tmp_path):
    path = jsonl(["fine"] * 50)
    with path.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(ValueError, match=r"corpus\.jsonl, line 51 is not a JSON object"):
        prepare(FileSource([str(path)]), tmp_path / "out", tokenizer=str(tokenizer_file))


@pytest.fixture
def some_bad(tmp_path, texts):
    """Makes a source of a file with bad lines, the first of them line 61, one of them the last."""
    lines = [json.dumps({"text": text}) for text in texts(100)]
    lines[60:60] = ['{"text": ""}']
    lines[70:70] = ["{broken", '{"text": null}', "[]"]
    path = tmp_path / "some_bad.jsonl"
    path.write_text("\n".join([*lines, '{"text": ""}']) + "\n")
    return lambda skip_bad: FileSource([str(path)], val_ratio=0.2, skip_bad=skip_bad)


COUNTED = {"empty text": 2, "not a JSON object": 2, "null instead of a string": 1}


def test_bad_documents_are_counted_in_the_manifest(some_bad, tokenizer_file, tmp_path):
    manifest = prepare(some_bad(True), tmp_path / "out", tokenizer=str(tokenizer_file)).manifest
    assert manifest.left_out == Manifest.load(tmp_path / "out").left_out == COUNTED
    assert sum(info.documents for info in manifest.splits.values()) == 100


@pytest.mark.parametrize("shard_tokens", [77, 10**6])
def test_stopped_among_bad_documents(some_bad, tokenizer_file, tmp_path, shard_tokens):
    options = {"tokenizer": str(tokenizer_file), "shard_tokens": shard_tokens}
    prepare(some_bad(True), tmp_path / "whole", **options)
    out = tmp_path / "out"

    def stop(counts, done):
        raise KeyboardInterrupt

    for _ in range(1000):
        before = _documents_read(out)
        try:
            prepare(some_bad(True), out, **options, on_progress=stop)
        except KeyboardInterrupt:
            if _documents_read(out) == before:  # nothing was safe yet: let it end
                prepare(some_bad(True), out, **options)
                break
        else:
            break
    assert contents(out) == contents(tmp_path / "whole")


def test_a_run_that_a_bad_line_stopped_continues_without_it(some_bad, tokenizer_file, tmp_path):
    options = {"tokenizer": str(tokenizer_file), "shard_tokens": 50}
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"line 61: field 'text' is empty\. --skip-bad leaves"):
        prepare(some_bad(False), out, **options)
    assert 0 < _documents_read(out) <= 60
    prepare(some_bad(True), out, **options)
    prepare(some_bad(True), tmp_path / "whole", **options)
    assert contents(out) == contents(tmp_path / "whole")
    with pytest.raises(ValueError, match="--skip-bad, which left out 5 documents: repeat it"):
        prepare(some_bad(False), out, **options)


def test_documents_that_end_with_another_token(corpus, tokenizer, tmp_path):
    file, out = tmp_path / "tokenizer.json", tmp_path / "out"
    file.write_text(tokenizer.to_json().replace(END_OF_TEXT, "</s>"), encoding="utf-8")
    with pytest.raises(ValueError, match="--end-of-text: '</s>'"):
        prepare(corpus(), out, tokenizer=str(file))
    manifest = prepare(corpus(), out, tokenizer=str(file), end_of_text="</s>").manifest
    assert manifest.settings["tokenizer"]["end_of_text"] == "</s>"
    for split, info in manifest.splits.items():
        stream = TokenStream(out, split)
        starts = stream.document_starts
        assert len(starts) == info.documents
        saved = load_tokenizer(str(out))
        assert saved.decode(stream.read(0, starts[1]).tolist()).endswith("</s>")
        assert saved.sha256 == manifest.tokenizer.sha256
    # the shards' own tokenizer.json says how they end
    prepare(corpus(), tmp_path / "again", tokenizer=str(out / "tokenizer.json"))
    first, second = contents(out), contents(tmp_path / "again")
    del first["manifest.json"], second["manifest.json"]  # which name different files
    assert second == first


def test_another_end_of_text_is_another_setting(corpus, tmp_path):
    options = {"train_bpe": 300, "shard_tokens": 50}

    def stop(counts, done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus(), tmp_path, **options, end_of_text="<end>", on_progress=stop)
    with pytest.raises(ValueError, match="tokenizer.end_of_text is '<end>' there and None here"):
        prepare(corpus(), tmp_path, **options)
    manifest = prepare(corpus(), tmp_path, **options, end_of_text="<end>").manifest
    assert load_tokenizer(str(tmp_path)).end_of_text == "<end>"
    assert load_tokenizer(str(tmp_path)).sha256 == manifest.tokenizer.sha256
    with pytest.raises(ValueError, match="end_of_text must not be empty"):
        prepare(corpus(), tmp_path, **options, end_of_text="")


def test_files_that_are_left_out_may_come_and_go(texts, tokenizer_file, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, text in enumerate(texts(20)):
        (folder / f"{number}.txt").write_text(text)

    def run():
        source = FileSource([str(folder)], val_ratio=0.2)
        return prepare(source, tmp_path / "out", tokenizer=str(tokenizer_file))

    run()
    (folder / "README.md").write_text("about")
    assert run().new_text_bytes == 0
    with pytest.raises(ValueError, match="source.as_text is None there and True here"):
        source = FileSource([str(folder)], val_ratio=0.2, as_text=True)
        prepare(source, tmp_path / "out", tokenizer=str(tokenizer_file))


def test_two_runs_at_once(corpus, tokenizer_file, tmp_path):
    def second(counts, done):
        prepare(corpus(), tmp_path / "out", tokenizer=str(tokenizer_file))

    with pytest.raises(ValueError, match="prepared by another process"):
        prepare(corpus(), tmp_path / "out", tokenizer=str(tokenizer_file), on_progress=second)


def test_bad_numbers(corpus, tmp_path):
    with pytest.raises(ValueError, match="train_bpe=10 must be at least 257"):
        prepare(corpus(), tmp_path, train_bpe=10)
    with pytest.raises(ValueError, match="exclude each other"):
        prepare(corpus(), tmp_path, tokenizer="gpt2", train_bpe=300)
    with pytest.raises(ValueError, match="shard_tokens=0 must be at least 1"):
        prepare(corpus(), tmp_path, train_bpe=300, shard_tokens=0)


def test_standard_library(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    library.mkdir()
    for i in range(200):
        (library / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n")
    monkeypatch.setattr("data.text.documents.sysconfig.get_paths", lambda: {"stdlib": str(library)})
    manifest = prepare(StdlibSource(val_ratio=0.1), tmp_path / "out", train_bpe=300).manifest
    assert sum(info.documents for info in manifest.splits.values()) == 200


KILLED_RUN = """
import sys, time
import data.text.prepare
from data.text.documents import FileSource

corpus, out, tokenizer, pause_s = sys.argv[1:]
data.text.prepare._BATCH_CHARS = 2000
data.text.prepare.prepare(
    FileSource([corpus], val_ratio=0.1),
    out,
    tokenizer=tokenizer,
    shard_tokens=700,
    on_progress=lambda counts, done: time.sleep(float(pause_s)),
)
"""


def test_killed_at_random_moments_ends_in_the_same_bytes(jsonl, texts, tokenizer_file, tmp_path):
    corpus = jsonl(texts(1500, seed=2))
    out, whole = tmp_path / "out", tmp_path / "whole"

    def start(folder, pause_s):
        command = [sys.executable, "-c", KILLED_RUN]
        command += [str(corpus), str(folder), str(tokenizer_file), str(pause_s)]
        return subprocess.Popen(command)

    assert start(whole, 0).wait(timeout=60) == 0
    rng = random.Random(0)
    kept = []
    for _ in range(5):
        before = kept[-1] if kept else -1
        process = start(out, 0.03)
        # kill only runs that got further, so that the five kills fall all over the work
        deadline = time.monotonic() + 30
        while _documents_read(out) <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.25))
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        assert not (out / "manifest.json").exists()
        kept.append(_documents_read(out))
    assert kept == sorted(set(kept))
    assert start(out, 0).wait(timeout=60) == 0
    assert contents(out) == contents(whole)


def _documents_read(folder):
    path = folder / "progress.json"
    return json.loads(path.read_text())["documents_read"] if path.exists() else -1

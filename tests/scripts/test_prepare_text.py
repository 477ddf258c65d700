import json

import datasets
import pytest

import scripts.prepare_text
from data.text.shards import Manifest, TokenStream
from data.text.tokenizer import load_tokenizer, train_tokenizer
from scripts.prepare_text import main
from training.command_line import user_errors_as_messages


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join(f"paragraph {i} of the text" for i in range(300)))
    return path


@pytest.fixture
def tokenizer_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(train_tokenizer(["the document of the text"], 270).to_json(), encoding="utf-8")
    return path


def test_a_text_file_becomes_shards_and_a_table(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    command = [str(corpus), "--out", str(out), "--train-bpe", "300", "--txt-separator", r"\n\n"]
    assert main(command) == 0
    infos = Manifest.load(out).splits
    assert sum(info.documents for info in infos.values()) == 300
    printed = capsys.readouterr().out
    for info in infos.values():
        assert f"{info.tokens:,}" in printed
    tokenizer = load_tokenizer(str(out))
    first = TokenStream(out, "train").read(0, 8).tolist()
    assert tokenizer.decode(first).startswith("par")
    assert main(command) == 0
    assert "is already finished; nothing to do" in capsys.readouterr().out


def test_an_empty_split_is_refused(corpus, tmp_path):
    options = ["--train-bpe", "300", "--txt-separator", "paragraph 150", "--val-ratio", "0.7"]
    with pytest.raises(ValueError, match=r"All 2 documents fell into val .*--val-ratio \(0\.1"):
        main([str(corpus), "--out", str(tmp_path / "out"), *options])


def test_a_single_document_is_split(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    command = [str(corpus), "--out", str(out), "--train-bpe", "300"]
    assert main(command) == 0
    assert "the last 10% of each is held out" in capsys.readouterr().out
    assert {s: i.documents for s, i in Manifest.load(out).splits.items()} == {"train": 1, "val": 1}
    streams = [TokenStream(out, split) for split in ("train", "val")]
    tokenizer = load_tokenizer(str(out))
    parts = [tokenizer.decode(s.read(0, len(s) - 1).tolist()) for s in streams]
    assert "".join(parts) == corpus.read_text() and parts[1].startswith("paragraph 2")
    assert 0.1 <= len(parts[1]) / len(corpus.read_text()) < 0.11
    assert main(command) == 0
    with pytest.raises(ValueError, match=r"source.val_cut is 0.1 there and 0.2 here"):
        main([*command, "--val-ratio", "0.2"])


def test_the_bar_ends_full(corpus, tmp_path, capsys):
    options = ["--train-bpe", "300", "--txt-separator", r"\n\n"]
    assert main([str(corpus), "--out", str(tmp_path / "out"), *options]) == 0
    assert " 100% 300 documents " in capsys.readouterr().out


def test_validation_files(corpus, tmp_path):
    val = tmp_path / "val.jsonl"
    val.write_text(json.dumps({"body": "held out"}) + "\n")
    out = tmp_path / "out"
    options = ["--train-bpe", "300", "--text-field", "body"]
    assert main([str(corpus), "--val", str(val), "--out", str(out), *options]) == 0
    assert {s: i.documents for s, i in Manifest.load(out).splits.items()} == {"train": 1, "val": 1}


def test_the_summary_lists_omitted_files_and_documents(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "some words"}\n{"text": null}\n' * 100)
    (folder / "README.md").write_text("# Texts")
    command = [str(folder), "--out", str(tmp_path / "out"), "--train-bpe", "300", "--val-ratio"]
    assert main([*command, "0.1", "--skip-bad"]) == 0
    printed = capsys.readouterr().out
    assert "  left_out_files: 1 .md\n" in printed
    assert "  left_out_documents: 100 null instead of a string\n" in printed


def test_source_files_as_text(tmp_path, capsys):
    folder = tmp_path / "project"
    folder.mkdir()
    for n in range(30):
        (folder / f"{n}.py").write_text(f"print({n})\r\n")
    out = tmp_path / "out"
    command = [str(folder), "--out", str(out), "--train-bpe", "300", "--val-ratio", "0.1"]
    with pytest.raises(FileNotFoundError, match=r"left out: 30 \.py.*--as-text reads"):
        main(command)
    assert main([*command, "--as-text"]) == 0
    stream = TokenStream(out, "train")
    text = load_tokenizer(str(out)).decode(stream.read(0, len(stream)).tolist())
    assert text.startswith("print(0)\n<|endoftext|>print(1)\n")


def test_interruption_says_how_to_resume(corpus, tmp_path, capsys, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(scripts.prepare_text, "prepare", interrupted)
    options = ["--train-bpe", "300", "--txt-separator", r"\n\n"]
    with pytest.raises(SystemExit) as ended, user_errors_as_messages():
        main([str(corpus), "--out", str(tmp_path / "out"), *options])
    assert ended.value.code == 130
    said = capsys.readouterr().err
    assert said == "interrupted: the same command resumes from here\n"


def test_openwebtext_is_compared_with_nanogpt(tokenizer_file, tmp_path, capsys, monkeypatch):
    rows = datasets.Dataset.from_dict({"text": ["the document", "of the text"] * 500})
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: rows)
    command = ["--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer_file)]
    assert main(command) == 0
    assert "is not GPT-2's, so the token counts cannot be compared" in capsys.readouterr().out
    sha256 = load_tokenizer(str(tokenizer_file)).sha256
    monkeypatch.setattr(scripts.prepare_text, "GPT2_SHA256", sha256)
    assert main(command) == 1
    assert "nanoGPT has {'train': 9035582198, 'val': 4434897}" in capsys.readouterr().err
    splits = Manifest.load(tmp_path / "out").splits
    tokens = {split: info.tokens for split, info in splits.items()}
    monkeypatch.setattr(scripts.prepare_text, "NANOGPT_TOKENS", tokens)
    assert main(command) == 0
    assert "matches nanoGPT's token counts exactly" in capsys.readouterr().out
    assert splits["val"].documents == 1


def test_tokenizer_and_training_one_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        main(["absent.txt", "--out", "absent", "--tokenizer", "gpt2", "--train-bpe", "300"])
    assert "not allowed with" in capsys.readouterr().err

import os
import pickle

import numpy as np
import pytest

from data.files import load_sealed, sealed, to_json
from data.text.shards import Manifest, TokenStream, token_dtype, verify


def test_reads_across_shard_borders(make_shards):
    documents = [[1, 2, 3], [], [4], list(range(5, 40)), [40]]
    folder = make_shards(documents, shard_tokens=4)
    expected = [i for ids in documents for i in [*ids, 0]]
    stream = TokenStream(folder, "train")
    assert [s.tokens for s in stream.info.shards] == [4, 39, 2]
    assert len(stream) == len(expected)
    for start in range(len(expected) + 1):
        for length in range(len(expected) - start + 1):
            ids = stream.read(start, length)
            assert ids.dtype == np.int64
            assert ids.tolist() == expected[start : start + length]
    assert stream.document_starts.tolist() == [0, 4, 5, 7, 43]
    assert stream.document_starts.dtype == np.int64
    verify(folder, Manifest.load(folder))


def test_document_larger_than_a_shard_stays_whole(make_shards):
    stream = TokenStream(make_shards([[1] * 50, [2]], shard_tokens=4), "train")
    assert [(s.tokens, s.documents) for s in stream.info.shards] == [(51, 1), (2, 1)]


def test_one_token_corpus(make_shards):
    stream = TokenStream(make_shards([[]]), "train")
    assert (len(stream), stream.read(0, 1).tolist()) == (1, [0])
    assert stream.document_starts.tolist() == [0]


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, 3), (2, 1), (3, 0), (0, -1)])
def test_range_outside_the_stream(make_shards, start, length):
    stream = TokenStream(make_shards([[1]]), "train")
    with pytest.raises(IndexError, match=f"start={start}, length={length} .* 2 tokens"):
        stream.read(start, length)


def test_dtype_grows_at_65536_entries(make_shards):
    assert token_dtype(65_535) == "uint16"
    assert token_dtype(65_536) == "uint32"
    stream = TokenStream(make_shards([[70_000]], vocab_size=70_001), "train")
    assert stream.read(0, 2).tolist() == [70_000, 0]


def test_torn_shard(make_shards):
    folder = make_shards([[1, 2, 3]])
    with (folder / "train_00000.bin").open("r+b") as file:
        file.truncate(5)
    with pytest.raises(ValueError, match=r"is torn: it has 5 bytes.* 8 in all"):
        TokenStream(folder, "train")


def test_a_pipe_is_not_waited_for(make_shards):
    folder = make_shards([[1, 2, 3]])
    path = folder / "train_00000.bin"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"train_00000\.bin is not a regular file"):
        TokenStream(folder, "train")


def test_a_shard_that_is_cut_while_it_is_read(make_shards):
    folder = make_shards([[1] * 50_000])
    stream = TokenStream(folder, "train")
    stream.read(0, 10)
    os.truncate(folder / "train_00000.bin", 4096)
    for first in (0, 40_000):
        with pytest.raises(ValueError, match=r"train_00000.bin is torn: it has 4096 bytes"):
            stream.read(first, 10)


def test_a_shard_that_is_overwritten_while_it_is_read(make_shards):
    folder = make_shards([[1, 2, 3]])
    stream = TokenStream(folder, "train")
    stream.read(0, 4)
    with (folder / "train_00000.bin").open("r+b") as file:
        file.write(bytes(8))
    with pytest.raises(ValueError, match=r"train_00000.bin has sha256=.*the file is damaged"):
        stream.read(0, 4)


def test_a_shard_that_is_touched_or_replaced_by_another_is_read_on(make_shards):
    folder = make_shards([[1, 2, 3]])
    stream = TokenStream(folder, "train")
    os.utime(folder / "train_00000.bin")
    assert stream.read(0, 4).tolist() == [1, 2, 3, 0]
    (folder / "other").write_bytes(bytes(8))
    (folder / "other").rename(folder / "train_00000.bin")
    assert stream.read(0, 4).tolist() == [1, 2, 3, 0]


def test_missing_shard(make_shards):
    folder = make_shards([[1, 2, 3]])
    (folder / "train_00000.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"train_00000\.bin is missing"):
        TokenStream(folder, "train")


def test_out_of_range_id(make_shards):
    folder = make_shards([[1, 2, 3]])
    np.array([1, 2, 60_000, 0], dtype="<u2").tofile(folder / "train_00000.bin")
    stream = TokenStream(folder, "train")
    with pytest.raises(ValueError, match=r"token id 60000 must be below .*vocab_size=100"):
        stream.read(0, 4)
    with pytest.raises(ValueError, match=r"has sha256=.* but the manifest says"):
        verify(folder, Manifest.load(folder))


def test_damaged_offsets(make_shards):
    folder = make_shards([[1, 2, 3]])
    np.save(folder / "train_00000.offsets.npy", np.zeros(2, dtype=np.int64))
    with pytest.raises(ValueError, match=r"\(2,\), but must hold int64 \(1,\)"):
        verify(folder, Manifest.load(folder))


def test_missing_folder_and_manifest_name_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"does not exist.*scripts\.prepare_text"):
        TokenStream(tmp_path / "absent", "train")
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json.*scripts\.prepare_text"):
        TokenStream(tmp_path, "train")
    (tmp_path / "progress.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="not finished; run the prepare command again"):
        TokenStream(tmp_path, "train")


def test_unknown_split_and_version(make_shards):
    folder = make_shards([[1]])
    with pytest.raises(ValueError, match=r"split='test' must be one of \['train', 'val'\]"):
        TokenStream(folder, "test")
    rewrite(folder, lambda values: values.update(format_version=9))
    with pytest.raises(ValueError, match="format_version=9"):
        TokenStream(folder, "train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format_version": 1, "spl', "is damaged .*prepare the folder again"),
        ("[]", "it holds list, not an object"),
        ('{"format_version": 1, "tokenizer": {"name": "x"}}', "lacks a field of a manifest"),
        ('{"format_version": 1, "tokenizer": 3}', "lacks a field of a manifest"),
        ("\xff", "is damaged .*prepare the folder again"),
    ],
)
def test_damaged_manifest(make_shards, text, message):
    folder = make_shards([[1]])
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"manifest\.json .*{message}"):
        TokenStream(folder, "train")


def rewrite(folder, change):
    """Change a manifest and update its seal, as an attacker could."""
    path = folder / "manifest.json"
    values = load_sealed(path)
    change(values)
    path.write_bytes(to_json(sealed(values)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(dtype="float16"), "dtype='float16', but ids below vocab_size=100 are"),
        (lambda m: m.update(dtype="uint32"), "dtype='uint32', but ids below vocab_size=100 are"),
        (lambda m: m["splits"]["train"].update(tokens=2), r"train has 2 tokens, .*have \[4\]"),
        (lambda m: m["splits"]["train"].update(documents=2), r"train has 2 documents, .* \[1\]"),
        (lambda m: m["splits"]["val"].update(text_bytes=-1), "text_bytes=-1 of val"),
        (lambda m: m["tokenizer"].update(vocab_size=4e9), "vocab_size=4000000000.0 and eot_id=0"),
        (lambda m: m["tokenizer"].update(eot_id=100), "vocab_size=100 and eot_id=100"),
        (
            lambda m: m["splits"]["train"]["shards"][0].update(name="../train_00000.bin"),
            r"shard 0 of train is '\.\./train_00000.bin', but must be train_00000.bin",
        ),
        (
            lambda m: m["splits"].update({"../train": m["splits"]["train"]}),
            r"split '\.\./train' must be one of train, val",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself(make_shards, change, message):
    folder = make_shards([[1, 2, 3]])
    rewrite(folder, change)
    with pytest.raises(ValueError, match=f"manifest.json contradicts itself: .*{message}"):
        TokenStream(folder, "train")


def test_a_changed_value_of_the_manifest_is_noticed(make_shards):
    folder = make_shards([[1, 2, 3]])
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"text_bytes": 3', '"text_bytes": 7'))
    with pytest.raises(ValueError, match="manifest.json is damaged .*prepare the folder again"):
        TokenStream(folder, "train")


def test_a_manifest_of_before_has_no_seal(make_shards):
    folder = make_shards([[1, 2, 3]])
    path = folder / "manifest.json"
    path.write_bytes(to_json(load_sealed(path)))
    assert len(TokenStream(folder, "train")) == 4


def test_a_replaced_shard_is_found_and_looked_for_once(make_shards, monkeypatch):
    folder = make_shards([[1, 2, 3], [4, 5]])
    TokenStream(folder, "train").verify()
    with monkeypatch.context() as patch:
        patch.setattr("data.text.shards._verify_shard", pytest.fail)  # nobody needs it
        TokenStream(folder, "train").verify()
    path = folder / "train_00000.bin"
    ids = np.fromfile(path, dtype="<u2")
    ids[1] = 7
    ids.tofile(path)
    with pytest.raises(ValueError, match=r"train_00000.bin has sha256=.* but the manifest says"):
        TokenStream(folder, "train").verify()


@pytest.mark.parametrize("offsets", [[0, 3], [0, 4, 5], [1, 4], [0, 900], [0, 0], [4, 0]])
def test_documents_start_where_the_ids_say(make_shards, offsets):
    folder = make_shards([[1, 2, 3], [4, 5]])
    TokenStream(folder, "train").verify()
    np.save(folder / "train_00000.offsets.npy", np.array(offsets))
    with pytest.raises(ValueError, match=r"train_00000.offsets.npy .* prepare the folder again"):
        TokenStream(folder, "train").verify()


def test_offsets_must_be_an_array(make_shards):
    folder = make_shards([[1, 2, 3]])
    for content in (b"", b"\x93NUMPY", pickle.dumps([1, 2])):
        (folder / "train_00000.offsets.npy").write_bytes(content)
        with pytest.raises(ValueError, match="offsets.npy is not a NumPy file"):
            TokenStream(folder, "train").verify()


def test_tokenizer_that_breaks_its_word(make_shards):
    with pytest.raises(ValueError, match="token id 100, which must be below"):
        make_shards([[100]])
    with pytest.raises(ValueError, match=r"2 ends of text \(id 0\) for 1 documents"):
        make_shards([[1, 0, 2]])

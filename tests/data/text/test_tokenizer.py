import json
import random
import re
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from data.text.tokenizer import (
    END_OF_TEXT,
    TextTokenizer,
    _cut_long_words,
    gpt2_tokenizer,
    load_tokenizer,
    train_tokenizer,
)

ODD_TEXTS = ["", " ", "\n", "a", "  two  spaces ", "naïve café 東京 🦋", "x\r\ny\u2028z\x1cw"]


@pytest.mark.parametrize("text", [*ODD_TEXTS, f"a{END_OF_TEXT}b", END_OF_TEXT])
def test_text_comes_back_and_never_contains_the_end_of_text_id(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot_id not in ids
    assert [e.ids for e in tokenizer.encode_batch([text, text])] == [ids, ids]


def test_no_space_is_put_before_the_text(tokenizer):
    assert tokenizer.encode("the") != tokenizer.encode(" the")


def test_ids_are_those_of_a_plain_gpt2_bpe(tokenizer):
    """Against GPT-2's algorithm written out naively: words, then the earliest merge first."""
    model = json.loads(tokenizer.to_json())["model"]
    rank = {tuple(pair): number for number, pair in enumerate(model["merges"])}
    word = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")
    text = f"the cat's  mat,\n\n it said 42!?   {END_OF_TEXT} def f(x): that'll\n"
    ids = []
    for match in word.findall(text):
        parts = list(match.replace(" ", "Ġ").replace("\n", "Ċ"))
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: rank.get(pair, len(rank)))
            if best not in rank:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        ids += [model["vocab"][part] for part in parts]
    assert tokenizer.encode(text) == ids


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("ab 1.,'\n\t\r\x1c\u00a0é東🦋<|>"), max_size=60))
def test_pieces_encode_like_the_whole(tokenizer, text):
    pieces = list(tokenizer.pieces(text, max_chars=3))
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_long_text_is_cut_and_text_without_borders_is_not(tokenizer):
    assert max(map(len, tokenizer.pieces("word " * 1000, 100))) <= 105
    assert list(tokenizer.pieces("x" * 1000, 100)) == ["x" * 1000]


@pytest.fixture
def other_words(tokenizer_file):
    """A tokenizer whose words are not known to be GPT-2's."""
    spec = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    spec["pre_tokenizer"]["add_prefix_space"] = True
    return TextTokenizer(Tokenizer.from_str(json.dumps(spec)), "other")


def test_other_word_rules_are_not_cut(other_words):
    assert list(other_words.pieces("a b c d", 1)) == ["a b c d"]


def test_no_piece_is_longer_than_the_limit(tokenizer, other_words, monkeypatch):
    monkeypatch.setattr("data.text.tokenizer.MAX_PIECE_CHARS", 100)
    for text in ("x" * 1050, "東" * 100, "東" * 101, "a\nbc " * 300, "line\n" * 70, "\n" * 250):
        for tokens in (tokenizer, other_words):
            pieces = list(tokens.pieces(text, 40))
            assert "".join(pieces) == text
            assert max(map(len, pieces)) <= 100 and all(pieces)
            assert len(pieces) <= -(-len(text) // 40) + 1
    assert set(other_words.pieces("line\n" * 70, 40)) == {"line\n" * 20, "line\n" * 10}


def test_a_word_of_megabytes_trains_a_tokenizer():
    """Words cost the square of their length: 4 s for 100,000 letters, half an hour for these."""
    letters = "".join(random.Random(0).choices("abcdefghijklmnop", k=1_000_000))
    started = time.process_time()
    for text in (letters, "x" * 1_000_000, " " * 1_000_000, "-" * 1_000_000):
        train_tokenizer([text], 260)
    assert time.process_time() - started < 60


def test_long_words_alone_are_cut_for_training(monkeypatch):
    given = []
    train = "data.text.tokenizer.Tokenizer.train_from_iterator"
    monkeypatch.setattr(train, lambda _, texts, __: given.extend(texts))
    monkeypatch.setattr("data.text.tokenizer.TextTokenizer", lambda *_: None)
    fine = "naïve 東京, " * 1000 + "x" * 4095 + "\n" * 4095
    train_tokenizer([fine, "x" * 10_000], 300)
    assert given == [fine, "\n.\n".join(["x" * 4096, "x" * 4096, "x" * 1808])]


def test_looking_for_long_words_takes_time_in_proportion_to_the_text():
    """A search from each letter to the end of its word took 10 s."""
    text = ("x" * 4000 + " ") * 250 + ("-" * 4000 + "x") * 250
    started = time.process_time()
    assert _cut_long_words(text) == text
    assert time.process_time() - started < 2


def test_file_and_folder_load_the_same_tokenizer(tokenizer, tokenizer_file):
    for name in (tokenizer_file, tokenizer_file.parent):
        loaded = load_tokenizer(str(name))
        assert (loaded.sha256, loaded.eot_id, loaded.vocab_size) == (
            tokenizer.sha256,
            tokenizer.eot_id,
            tokenizer.vocab_size,
        )


def test_hash_sees_the_meaning_and_not_the_form(tokenizer, tokenizer_file):
    spec = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    spec["model"]["continuing_subword_prefix"] = ""
    same = TextTokenizer(Tokenizer.from_str(json.dumps(spec)), "same")
    assert same.sha256 == tokenizer.sha256
    del spec["model"]["merges"][-1]
    assert TextTokenizer(Tokenizer.from_str(json.dumps(spec)), "x").sha256 != tokenizer.sha256


@pytest.fixture
def two_files(tokenizer, tmp_path):
    """The tokenizer in the files that GPT-2 was released in, as vocab.json and merges.txt."""
    model = json.loads(tokenizer.to_json())["model"]
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    merges.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return vocab, merges


def test_vocabulary_and_merges_give_the_same_tokenizer(tokenizer, two_files):
    built = gpt2_tokenizer(*two_files)
    assert (built.sha256, built.eot_id) == (tokenizer.sha256, tokenizer.eot_id)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("text", ["", "[]", "a b c", '{"a": "b"}'])
def test_wrong_vocabulary_or_merges_are_refused(two_files, which, text):
    if (which, text) == (1, ""):
        text = "a"  # no merges at all would be a tokenizer of bytes
    two_files[which].write_text(text)
    with pytest.raises(ValueError, match="must be the vocabulary and the merges"):
        gpt2_tokenizer(*two_files)


@pytest.mark.parametrize("text", [*ODD_TEXTS, f"a{END_OF_TEXT}b", "東京 naïve 🦋🦋 cafés, 東"])
def test_bytes_of_tokens_add_up_to_those_of_the_text(tokenizer, text):
    sizes = tokenizer.token_bytes()
    assert sizes.shape == (tokenizer.vocab_size,) and sizes.dtype == np.int64
    ids = tokenizer.encode(text)
    assert sizes[ids].sum() == len(text.encode())
    assert (sizes[ids] > 0).all()  # also for a character split into several tokens
    assert sizes[tokenizer.eot_id] == 0


def test_bytes_of_tokens_need_a_byte_level_tokenizer(tokenizer):
    words = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1}, unk_token="a"))
    words.add_special_tokens([END_OF_TEXT])
    with pytest.raises(ValueError, match="tokenizer 'words' must be a byte-level BPE"):
        TextTokenizer(words, "words").token_bytes()
    # an added token is written as it is, and no other special token is text either
    inner = Tokenizer.from_str(tokenizer.to_json())
    inner.add_tokens(["東京 "])
    inner.add_special_tokens(["<|pad|>"])
    more = TextTokenizer(inner, "more")
    assert more.token_bytes()[-2:].tolist() == [7, 0]
    assert more.token_bytes()[more.encode("x東京 y")].sum() == 9


def test_training_is_deterministic_and_bounded_below(texts, tokenizer):
    again = train_tokenizer(texts(200), 400)
    assert again.to_json() == tokenizer.to_json()
    assert train_tokenizer(texts(200), 300).vocab_size == 300
    with pytest.raises(ValueError, match="train_bpe=256 must be at least 257"):
        train_tokenizer(["a"], 256)


def test_padding_and_truncation_of_the_file_are_off(tokenizer, tokenizer_file):
    inner = Tokenizer.from_file(str(tokenizer_file))
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    assert TextTokenizer(inner, "x").encode("a b c") == tokenizer.encode("a b c")


def test_tokenizer_without_end_of_text_is_refused():
    bare = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ValueError, match=r"must have the special token .*; it has none, so choose"):
        TextTokenizer(bare, "bare")
    bare.add_special_tokens([f"<{n}>" for n in range(12)])
    bare.add_tokens(["no end"])
    listed = ", ".join(f"'<{n}>'" for n in range(10)) + r", \.\.\.\.$"
    with pytest.raises(ValueError, match=rf"'<\|endoftext\|>'.* with --end-of-text: {listed}"):
        TextTokenizer(bare, "bare")
    with pytest.raises(ValueError, match="must have the special token 'no end' to end"):
        TextTokenizer(bare, "bare", "no end")


@pytest.fixture
def other_end(tokenizer, tmp_path):
    """A file of a tokenizer without "<|endoftext|>"."""
    path = tmp_path / "other_end.json"
    path.write_text(tokenizer.to_json().replace(END_OF_TEXT, "</s>"), encoding="utf-8")
    return str(path)


def test_another_token_ends_documents(tokenizer, other_end, tmp_path):
    with pytest.raises(ValueError, match=r"--end-of-text: '</s>'\."):
        load_tokenizer(other_end)
    other = load_tokenizer(other_end, "</s>")
    assert (other.end_of_text, other.eot_id) == ("</s>", tokenizer.eot_id)
    assert other.eot_id not in other.encode("a</s>b")
    # which its own file knows
    saved = tmp_path / "tokenizer.json"
    saved.write_text(other.to_json(), encoding="utf-8")
    again = load_tokenizer(str(saved))
    assert (again.end_of_text, again.sha256, again.to_json()) == (
        "</s>", other.sha256, other.to_json(),
    )  # fmt: skip
    assert Tokenizer.from_file(str(saved)).to_str() == other.to_library_json()


def test_tokenizers_that_end_documents_otherwise_are_not_the_same(tokenizer):
    inner = Tokenizer.from_str(tokenizer.to_json())
    inner.add_special_tokens(["</s>"])
    usual = TextTokenizer(inner, "usual")
    other = TextTokenizer(Tokenizer.from_str(inner.to_str()), "other", "</s>")
    assert usual.to_library_json() == other.to_library_json()
    assert usual.sha256 != other.sha256
    assert usual.eot_id != other.eot_id


def test_a_trained_tokenizer_has_the_end_that_was_asked_for(texts):
    trained = train_tokenizer(texts(20), 300, "<end>")
    assert trained.decode([trained.eot_id]) == trained.end_of_text == "<end>"

"""Files of tokenizers that cannot be used, and the limits on what they may take."""

import json
import os
import threading

import pytest
from tokenizers import Tokenizer, models

from data.text.tokenizer import (
    END_OF_TEXT,
    TextTokenizer,
    load_tokenizer,
)
from data.text.tokenizer_errors import check_growth, check_memory, silent_stderr


def test_wrong_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        load_tokenizer(str(tmp_path / "absent.json"))
    other = tmp_path / "other.json"
    for text in ('{"a": 0}', "[]", '{"model": 3}', "no JSON", "", "[" * 100_000):
        other.write_text(text)
        with pytest.raises(ValueError, match=r"other\.json must be a tokenizer\.json"):
            load_tokenizer(str(other))


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model", "continuing_subword_prefix", "日本"),  # of which the merges have none
        (None, "normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "a"}),
        (None, "normalizer", {"type": "Prepend", "prepend": ""}),
    ],
)
def test_a_file_that_makes_the_library_panic(tokenizer, tmp_path, capfd, part, name, value):
    spec = json.loads(tokenizer.to_json())
    (spec[part] if part else spec)[name] = value
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    with pytest.raises(ValueError, match=r"tokenizer\.json.* \(the tokenizers library panics: "):
        load_tokenizer(str(path))
    assert capfd.readouterr() == ("", "")  # nor the library's own trace


def test_a_tokenizer_that_lacks_what_a_text_needs():
    words = Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="<unk>"))
    words.add_special_tokens([END_OF_TEXT])
    tokenizer = TextTokenizer(words, "words")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(ValueError, match=r"'words' cannot be used.*\(WordLevel error: Missing"):
            encode("b")


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_replacements_that_would_fill_the_memory(tokenizer, tmp_path, part):
    spec = json.loads(tokenizer.to_json())
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    path = tmp_path / "tokenizer.json"
    for n_steps in (3, 12):
        spec[part] = {"type": "Sequence", f"{part}s": [step] * n_steps}
        path.write_text(json.dumps(spec))
        if n_steps == 3:
            load_tokenizer(str(path))
    with pytest.raises(ValueError, match=rf"the {part} of .* 10,000 times as long"):
        load_tokenizer(str(path))


def _replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def _sequence(*steps):
    return {"type": "Sequence", "normalizers": list(steps)}


NAMES_OF_SPACES = [
    _replace({"String": char}, f"<|{name}|>")
    for char, name in {"\n": "newline", "\t": "tabulator", "\r": "carriage"}.items()
]


def test_replacements_of_different_characters_do_not_compound():
    check_growth(_sequence({"type": "NFC"}, *NAMES_OF_SPACES), "normalizer")
    letters = [_replace({"String": char}, "xy") for char in "abcdefghij"]
    check_growth(_sequence(*letters), "normalizer")
    check_growth(None, "normalizer")


@pytest.mark.parametrize(
    "steps",
    [
        # a letter of one content is the next pattern
        [_replace({"String": char}, chr(ord(char) + 1) * 10) for char in "abcd"],
        # a pattern that only two contents in a row hold
        [_replace({"String": "ab"}, "ba" * 10)] * 3,
        # a regular expression may match anything
        [_replace({"Regex": "\\s"}, "x" * 10)] * 4,
        # other forms of the letter, of which a step between makes the pattern
        [_replace({"String": "a"}, "A" * 10), {"type": "Lowercase"}] * 4,
        [_replace({"String": "e"}, "é" * 10), {"type": "StripAccents"}] * 4,
        [*NAMES_OF_SPACES, {"type": "Precompiled", "precompiled_charsmap": ""}],
        [{"type": "Prepend", "prepend": "x" * 40}] * 2,
    ],
)
def test_replacements_that_compound(steps):
    with pytest.raises(ValueError, match="the normalizer may make a text .* times as long"):
        check_growth(_sequence(*steps), "normalizer")


def test_threads_that_silence_stderr_do_not_lose_it():
    before = os.fstat(2)
    entered, left = threading.Event(), threading.Event()

    def second():
        with silent_stderr():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=second)
    with silent_stderr():
        thread.start()
        entered.wait(0.3)  # it would enter, if it could
    left.set()
    thread.join()
    assert os.path.samestat(os.fstat(2), before)


def test_memory_that_is_not_there_is_noticed_before_it_is_taken(tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr("data.text.tokenizer.check_memory", asked.append)
    tokenizer.encode_batch(["ab", "c" * 98])
    assert 100 * 64 < asked[0] < 100 * 256
    check_memory(1 << 20)
    with pytest.raises(MemoryError, match="MiB more: raise the limit"):
        check_memory(1 << 60)


def test_a_tokenizer_of_absurd_size_is_not_read(tmp_path):
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"tokenizer\.json has 1099511627776 bytes"):
        load_tokenizer(str(path))


def test_offline_hub_says_to_pass_a_file(monkeypatch):
    def offline(name, file):
        raise FileNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(ValueError, match=r"pass the path of a tokenizer\.json.*--train-bpe"):
        load_tokenizer("gpt2")


def test_an_id_that_no_table_has_room_for(corpus, tmp_path):
    spec = json.loads((corpus / "tokenizer.json").read_text())
    last = max(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    spec["model"]["vocab"][last] = 4_000_000_000
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    with pytest.raises(ValueError, match="has the id 4000000000, but ids must be below 16777216"):
        load_tokenizer(str(path))

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from data.text.tokenizer import END_OF_TEXT, StreamDecoder, TextTokenizer, train_tokenizer

ODD = "naïve 東京 🦋🦋 ~\ufffd! é"


@pytest.fixture(scope="module")
def bytewise():
    """Every byte a token, so that each character of several bytes is cut."""
    return train_tokenizer(["plain text"], vocab_size=257)


def feed(tokenizer, ids):
    decoder = StreamDecoder(tokenizer)
    return [decoder.feed(i) for i in ids], decoder.finish()


def test_characters_come_whole(bytewise):
    ids = bytewise.encode(ODD)
    assert len(ids) == len(ODD.encode())
    pieces, rest = feed(bytewise, ids)
    assert len(ids) > len([piece for piece in pieces if piece])
    # a true U+FFFD looks like half a character until the next one comes
    assert [piece for piece in pieces if piece] == [
        *ODD.partition("\ufffd!")[0],
        "\ufffd!",
        " ",
        "é",
    ]
    assert rest == ""


def test_a_text_that_ends_inside_a_character(bytewise):
    ids = bytewise.encode("a🦋")[:-1]
    assert feed(bytewise, ids) == (["a", "", "", ""], bytewise.decode(ids)[1:])


def test_many_ids_at_once_and_none(bytewise):
    decoder = StreamDecoder(bytewise)
    ids = bytewise.encode("Tokyo 東")
    assert decoder.feed() == ""
    assert decoder.feed(*ids[:-1]) == ""
    assert decoder.feed(ids[-1]) == "Tokyo 東"
    assert decoder.finish() == ""


@settings(deadline=None)
@given(st.data())
def test_pieces_are_the_text_of_all_ids(bytewise, data):
    ids = data.draw(
        st.one_of(
            st.lists(st.integers(0, bytewise.vocab_size - 1), max_size=30),
            st.text(max_size=10).map(bytewise.encode),
        )
    )
    pieces, rest = feed(bytewise, ids)
    assert "".join(pieces) + rest == bytewise.decode(ids)


def test_a_space_that_a_tokenizer_drops_at_the_beginning_is_not_dropped_later():
    words = {"▁the": 0, "▁cat": 1, "s": 2, END_OF_TEXT: 3}
    plain = Tokenizer(models.WordLevel(words, unk_token=END_OF_TEXT))
    plain.decoder = decoders.Metaspace()
    plain.add_special_tokens([END_OF_TEXT])
    tokenizer = TextTokenizer(plain, "words")
    ids = [0, 1, 2, 1]
    assert tokenizer.decode(ids) == "the cats cat"
    assert feed(tokenizer, ids) == (["the", " cat", "s", " cat"], "")
    decoder = StreamDecoder(tokenizer)
    assert [decoder.feed(0), decoder.feed(), decoder.feed(1)] == ["the", "", " cat"]

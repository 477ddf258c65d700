"""Tokenizers: GPT-2's, any local tokenizer.json, or a byte-level BPE trained on the corpus.

Text is always ordinary: a document that contains "<|endoftext|>" is encoded character by character
like any other, as by tiktoken's `encode_ordinary`, so the end-of-text id only ever ends a document.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from data.files import check_size, parse_json, read_text
from data.hub import from_hub
from data.text.shards import TOKENIZER
from data.text.tokenizer_errors import check_growth, check_memory, silent_stderr, tokenizer_errors
from kernels.limits import MAX_VOCAB_SIZE

END_OF_TEXT = "<|endoftext|>"
GPT2_SHA256 = "43f54e5cac104c56c995390a46654c9c4f72c8db4dd8a757f196cfe31e22d346"
"""`TextTokenizer.sha256` of GPT-2's released vocabulary and merges."""

MAX_PIECE_CHARS = 1 << 20  # a text without a place to cut is encoded in pieces of this size
_BYTES_PER_CHAR = 128
"""Memory that the library takes while it encodes: about this much for a token of one character."""

# GPT-2's pre-tokenizer always starts a new word at white space that follows a visible character.
# The last two ranges are Chinese and Japanese punctuation.
_WORD_BORDER = re.compile(r"(?<=[!-~\w\u3001-\u3020\uff01-\uff5e])[ \n]")

_MOST_LISTED = 10
_MAX_TRAINING_WORD = 1 << 12  # training a BPE takes time with the square of the longest word
# GPT-2's words are all letters or digits, or all other characters. A match starts where such a run
# starts: from each character on, the rest of its word would be read again.
_LONG_WORD = re.compile(
    rf"(?<![^\W_])[^\W_]{{{_MAX_TRAINING_WORD + 1},}}"
    rf"|(?<![\W_])[\W_]{{{_MAX_TRAINING_WORD + 1},}}"
)


# The key that marks, among the added tokens of a tokenizer.json, one that ends documents in the
# place of "<|endoftext|>". The tokenizers library ignores it.
_ENDS_DOCUMENTS = "ends_documents"


class TextTokenizer:
    """A `tokenizers.Tokenizer` set up for language modelling, with what the shards record of it."""

    def __init__(self, tokenizer: Tokenizer, name: str, end_of_text: str = END_OF_TEXT) -> None:
        """Take over a tokenizer, and switch off its padding, truncation and special-token matching.

        Raises:
            ValueError: It has no special token `end_of_text`.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        self.vocab_size: int = (
            max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
        )
        if self.vocab_size > MAX_VOCAB_SIZE:  # to_str would count to it
            raise ValueError(
                f"Tokenizer {name!r} has the id {self.vocab_size - 1}, and ids must be below "
                f"{MAX_VOCAB_SIZE}; choose another tokenizer."
            )
        spec = json.loads(tokenizer.to_str())
        for part in ("normalizer", "decoder"):
            check_growth(spec[part], f"{part} of tokenizer {name!r}")
        with silent_stderr(), tokenizer_errors(name), suppress(Exception):
            # some files panic with their first text only; an Exception is a word that this
            # tokenizer does not know, and the user's text may not have it
            tokenizer.decode(tokenizer.encode("The cat is 42.").ids)
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        if end_of_text not in special:
            others = (
                f"name another of its special tokens with --end-of-text: {_listed(special)}"
                if special
                else "it has none, so choose another tokenizer.json"
            )
            raise ValueError(
                f"Tokenizer {name!r} must have the special token {end_of_text!r} to end documents "
                f"with; {others}."
            )
        self.name = name
        """What messages and the manifest call it."""
        self.end_of_text = end_of_text
        """The special token that ends documents."""
        self.eot_id: int = special[end_of_text]
        self._tokenizer = tokenizer
        self.sha256 = _meaning_sha256(spec, end_of_text)
        self._byte_level = (spec["decoder"] or {}).get("type") == "ByteLevel"
        self._splits_at_word_borders = _is_gpt2_like(spec)
        self.undoes_bytes: bool = _undoes_bytes(spec)
        """Whether it decodes the bytes that it encodes; true also where ids are not of bytes."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ordinary text, with no end of text."""
        with tokenizer_errors(self.name):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Encode many texts on all cores; `.ids` of each result holds its token ids."""
        check_memory(_BYTES_PER_CHAR * sum(map(len, texts)) + 1)
        with tokenizer_errors(self.name):
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, the end of text written out."""
        with tokenizer_errors(self.name):
            return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each id stands for: int64 (vocab_size,), 0 for the end of text.

        Raises:
            ValueError: it is no byte-level tokenizer, so that ids do not stand for fixed bytes.
        """
        if not self._byte_level:
            raise ValueError(
                f"tokenizer {self.name!r} must be a byte-level BPE, as GPT-2's: in others the "
                "bytes of a token depend on its neighbours."
            )
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        # a byte-level vocabulary writes each byte as one character
        for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            sizes[number] = len(token)
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            sizes[number] = 0 if token.special else len(token.content.encode())
        return sizes

    def pieces(self, text: str, max_chars: int) -> Iterator[str]:
        """Cut a long text where the token ids of the pieces join to exactly those of the whole.

        Only GPT-2's word rule is known to allow that; for other tokenizers, and where the text has
        no word border, a piece is longer. No piece exceeds `MAX_PIECE_CHARS`, so that time and
        memory stay in proportion to the text: a piece that would is cut after a line, or anywhere
        in a longer line, and the tokens next to that cut may differ from those of the whole.
        """
        start = 0
        while len(text) - start > max_chars:
            limit = start + MAX_PIECE_CHARS
            border = None
            if self._splits_at_word_borders:
                border = _WORD_BORDER.search(text, start + max_chars, limit)
            if border is not None:
                end = border.start()
            elif len(text) > limit:
                end = text.rfind("\n", start, limit) + 1 or limit
            else:
                break
            yield text[start:end]
            start = end
        yield text[start:]

    def to_json(self) -> str:
        """The whole tokenizer, its end of text included, as `load_tokenizer` reads it."""
        if self.end_of_text == END_OF_TEXT:
            return self.to_library_json()
        spec = json.loads(self.to_library_json())
        for token in spec["added_tokens"]:
            if token["id"] == self.eot_id:
                token[_ENDS_DOCUMENTS] = True
        return json.dumps(spec, ensure_ascii=False)

    def to_library_json(self) -> str:
        """The tokenizer as the tokenizers library saves it: nothing says which token ends texts."""
        return self._tokenizer.to_str(pretty=False)


class StreamDecoder:
    """Decodes ids that come one at a time, in pieces that end between characters.

    A byte-level token can end inside a character, which decodes as U+FFFD until the rest of its
    bytes have come: so long, the whole piece is held back. All pieces together are
    `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        # the ids of the last piece are decoded along: some tokenizers drop a space at the beginning
        self._last: list[int] = []
        self._held: list[int] = []

    def feed(self, *ids: int) -> str:
        """Take over more ids; returns the text that they complete, perhaps none."""
        self._held += ids
        piece = self.finish()
        if not self._held or piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._last, self._held = self._held, []
        return piece

    def finish(self) -> str:
        """The text that is held back, which is the rest when no more ids come."""
        before = self._tokenizer.decode(self._last)
        return self._tokenizer.decode(self._last + self._held)[len(before) :]


def load_tokenizer(name: str, end_of_text: str | None = None) -> TextTokenizer:
    """Load a tokenizer.json file, or "gpt2" (or another name) from the Hugging Face hub.

    Documents end with the special token `end_of_text`. By default it is the one that the file was
    saved with, where that is ours, and "<|endoftext|>" elsewhere.

    Raises:
        ValueError: The name is neither, the hub cannot be reached, or there is no end of text.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / TOKENIZER
    if not path.exists():
        if path.suffix == ".json":
            raise FileNotFoundError(
                f"Tokenizer {name!r} must be a tokenizer.json file; there is none."
            )
        path = _download(name)
    check_size(path)
    requirement = (
        f"{path} must be a tokenizer.json as the tokenizers library saves it; a vocab.json or "
        "merges.txt alone is not enough"
    )
    data = path.read_bytes()
    tokenizer = _from_json(data, requirement)
    return TextTokenizer(tokenizer, name, end_of_text or _marked_end(data) or END_OF_TEXT)


def _marked_end(data: bytes) -> str | None:
    """The token that a tokenizer.json of ours marks as the end of documents, if there is one."""
    if _ENDS_DOCUMENTS.encode() not in data:
        return None
    added = parse_json(data)["added_tokens"]
    return next((token["content"] for token in added if token.get(_ENDS_DOCUMENTS) is True), None)


def _download(name: str) -> Path:
    remedy = (
        "check the name and the network, give the path of a tokenizer.json (hf download "
        f"{name} tokenizer.json, elsewhere), or train one on the text (--train-bpe 16384)"
    )
    with from_hub(f"the tokenizer {name!r}", remedy):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, TOKENIZER))


def gpt2_tokenizer(vocab: Path, merges: Path, end_of_text: str = END_OF_TEXT) -> TextTokenizer:
    """GPT-2's tokenizer from the two files it was released in: vocab.json and merges.txt.

    Raises:
        ValueError: One of the files is not what its name says.
    """
    shell = Tokenizer(models.BPE())
    shell.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    shell.decoder = decoders.ByteLevel()
    spec = json.loads(shell.to_str())
    requirement = (
        f"{vocab} and {merges.name} next to it must be the vocabulary and the merges of a "
        "byte-level BPE, as GPT-2 has them"
    )
    try:
        spec["model"]["vocab"] = parse_json(read_text(vocab))
        lines = read_text(merges).split("\n")
    except ValueError as error:
        raise ValueError(f"{requirement}: {error}.") from error
    spec["model"]["merges"] = [
        line.split(" ") for line in lines if line and not line.startswith("#version")
    ]
    tokenizer = _from_json(json.dumps(spec).encode(), requirement)
    tokenizer.add_special_tokens([end_of_text])
    return TextTokenizer(tokenizer, str(vocab.parent), end_of_text)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, end_of_text: str = END_OF_TEXT
) -> TextTokenizer:
    """Train a byte-level BPE with GPT-2's word rule; the same texts give the same tokenizer.

    It takes about 1 s for 5 MB on two cores. A small sample may support fewer entries than the
    `vocab_size` wanted, which is at least 257.
    """
    check_bpe_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_text],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_cut_long_words, texts), trainer)
    return TextTokenizer(tokenizer, f"bpe-{vocab_size}", end_of_text)


def _cut_long_words(text: str) -> str:
    """Divide longer words, and longer white space, after every 4,096 characters.

    The dot has no neighbour in its word, so that no pair of it is counted.
    """

    def cut(run: re.Match[str]) -> str:
        starts = range(0, len(run[0]), _MAX_TRAINING_WORD)
        return "\n.\n".join(run[0][start : start + _MAX_TRAINING_WORD] for start in starts)

    return _LONG_WORD.sub(cut, text)


def _from_json(data: bytes, requirement: str) -> Tokenizer:
    with silent_stderr(), tokenizer_errors(requirement=requirement):
        return Tokenizer.from_buffer(data)


def check_bpe_vocab_size(vocab_size: int) -> None:
    """Refuse a vocabulary that cannot hold every byte."""
    if vocab_size < 257:
        raise ValueError(
            f"train_bpe={vocab_size} must be at least 257: 256 bytes and the end of text."
        )


def _listed(tokens: Iterable[str]) -> str:
    first = list(islice(tokens, _MOST_LISTED + 1))
    return ", ".join(map(repr, first[:_MOST_LISTED])) + (", ..." if first[_MOST_LISTED:] else "")


def _meaning_sha256(spec: dict, end_of_text: str) -> str:
    """Hash what decides the ids, so that files which differ only in form count as the same."""
    meaning = {
        "normalizer": spec["normalizer"],
        "pre_tokenizer": spec["pre_tokenizer"],
        "added_tokens": [[t["id"], t["content"], t["special"]] for t in spec["added_tokens"]],
        # absent, null, "" and false are four spellings of an unused option
        "model": {key: value for key, value in spec["model"].items() if value},
    }
    if end_of_text != END_OF_TEXT:  # of which the hashes of older versions say nothing
        meaning["end_of_text"] = end_of_text
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()


def _is_gpt2_like(spec: dict) -> bool:
    gpt2_words = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    words = spec["pre_tokenizer"] or {}
    return (
        spec["normalizer"] is None
        and all(words.get(key) == value for key, value in gpt2_words.items())
        and all(token["special"] for token in spec["added_tokens"])
    )


def _undoes_bytes(spec: dict) -> bool:
    """Whether a byte-level pre-tokenizer has its decoder, which `_meaning_sha256` leaves out."""
    encodes = "ByteLevel" in _types(spec["pre_tokenizer"], "pretokenizers")
    decodes = _types(spec["decoder"], "decoders")
    return not encodes or ("ByteLevel" in decodes and decodes <= {"ByteLevel", "Fuse"})


def _types(part: dict | None, inner: str) -> set[str]:
    """The types of a part of a tokenizer; of a sequence, those of its `inner` parts."""
    return {each["type"] for each in (part or {}).get(inner, [part or {"type": "none"}])}

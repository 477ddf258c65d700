"""Tokenizers: GPT-2's, any local tokenizer.json, or a byte-level BPE trained on the corpus.

Special tokens in the text are not matched: "<|endoftext|>" in a document is encoded as ordinary
characters, like tiktoken's `encode_ordinary`. The end-of-text id therefore only ends documents.
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

MAX_PIECE_CHARS = 1 << 20  # piece size for a text without a word border to cut at
_BYTES_PER_CHAR = 128
"""Memory that the library needs while encoding, about this much for a token of one character."""

# GPT-2's pre-tokenizer always starts a new word at white space that follows a visible character.
# The last two ranges are Chinese and Japanese punctuation.
_WORD_BORDER = re.compile(r"(?<=[!-~\w\u3001-\u3020\uff01-\uff5e])[ \n]")

_MAX_LISTED = 10
_MAX_TRAINING_WORD = 1 << 12  # the time to train a BPE grows with the square of the longest word
# GPT-2's words consist of letters or digits only, or of other characters only. A match may only
# start at the beginning of such a run; otherwise every character would scan the rest of its word.
_LONG_WORD = re.compile(
    rf"(?<![^\W_])[^\W_]{{{_MAX_TRAINING_WORD + 1},}}"
    rf"|(?<![\W_])[\W_]{{{_MAX_TRAINING_WORD + 1},}}"
)


# Key in the added tokens of a tokenizer.json that marks the token which ends documents instead of
# "<|endoftext|>". The tokenizers library ignores it.
_ENDS_DOCUMENTS = "ends_documents"


class TextTokenizer:
    """A `tokenizers.Tokenizer` configured for language modelling, with metadata for the shards."""

    def __init__(self, tokenizer: Tokenizer, name: str, end_of_text: str = END_OF_TEXT) -> None:
        """Take ownership of a tokenizer; disables padding, truncation and special-token matching.

        Raises:
            ValueError: The tokenizer has no special token `end_of_text`.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        self.vocab_size: int = (
            max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
        )
        if self.vocab_size > MAX_VOCAB_SIZE:  # to_str would loop over all ids
            raise ValueError(
                f"Tokenizer {name!r} has the id {self.vocab_size - 1}, but ids must be below "
                f"{MAX_VOCAB_SIZE}; choose another tokenizer."
            )
        spec = json.loads(tokenizer.to_str())
        for part in ("normalizer", "decoder"):
            check_growth(spec[part], f"{part} of tokenizer {name!r}")
        with silent_stderr(), tokenizer_errors(name), suppress(Exception):
            # Some files only panic on their first text. An Exception means a word that this
            # tokenizer does not know, which is acceptable: the user's text may not contain it.
            tokenizer.decode(tokenizer.encode("The cat is 42.").ids)
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        if end_of_text not in special:
            others = (
                f"pass another of its special tokens with --end-of-text: {_listed(special)}"
                if special
                else "it has none, so choose another tokenizer.json"
            )
            raise ValueError(
                f"Tokenizer {name!r} must have the special token {end_of_text!r} to end documents "
                f"with; {others}."
            )
        self.name = name
        """Name in messages and in the manifest."""
        self.end_of_text = end_of_text
        """Special token that ends documents."""
        self.eot_id: int = special[end_of_text]
        self._tokenizer = tokenizer
        self.sha256 = _meaning_sha256(spec, end_of_text)
        self._byte_level = (spec["decoder"] or {}).get("type") == "ByteLevel"
        self._splits_at_word_borders = _is_gpt2_like(spec)
        self.undoes_bytes: bool = _undoes_bytes(spec)
        """Whether decoding reverses byte-level encoding; true if the ids do not encode bytes."""

    def encode(self, text: str) -> list[int]:
        """Encode ordinary text to token ids, without an end of text."""
        with tokenizer_errors(self.name):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Encode many texts on all cores; `.ids` of each result holds its token ids."""
        check_memory(_BYTES_PER_CHAR * sum(map(len, texts)) + 1)
        with tokenizer_errors(self.name):
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, including the end of text."""
        with tokenizer_errors(self.name):
            return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        """Number of UTF-8 bytes of each id: int64 (vocab_size,), 0 for the end of text.

        Raises:
            ValueError: The tokenizer is not byte-level, so its ids do not represent fixed bytes.
        """
        if not self._byte_level:
            raise ValueError(
                f"tokenizer {self.name!r} must be a byte-level BPE, like GPT-2's: in others, the "
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
        """Cut a long text so that the token ids of the pieces, joined, equal those of the whole.

        Only GPT-2's word rule is known to allow such cuts. For other tokenizers, and in text
        without word borders, pieces are longer. No piece exceeds `MAX_PIECE_CHARS`, so time and
        memory stay proportional to the text. A piece that would exceed it is cut after a line, or
        inside a very long line. Next to such a cut, the tokens may differ from those of the whole.
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
        """Serialize the tokenizer with its end of text; `load_tokenizer` reads the result."""
        if self.end_of_text == END_OF_TEXT:
            return self.to_library_json()
        spec = json.loads(self.to_library_json())
        for token in spec["added_tokens"]:
            if token["id"] == self.eot_id:
                token[_ENDS_DOCUMENTS] = True
        return json.dumps(spec, ensure_ascii=False)

    def to_library_json(self) -> str:
        """Serialize the tokenizer in the library's format, which does not mark the end of text."""
        return self._tokenizer.to_str(pretty=False)


class StreamDecoder:
    """Streaming decoder: takes ids one at a time and returns text that ends between characters.

    A byte-level token can end inside a character, which decodes to U+FFFD until its remaining bytes
    arrive. Until then, the whole piece is held back. The concatenation of all pieces equals
    `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        # Decode the ids of the last piece again: some tokenizers drop a space at the beginning.
        self._last: list[int] = []
        self._pending: list[int] = []

    def feed(self, *ids: int) -> str:
        """Add ids and return the text that they complete; it may be empty."""
        self._pending += ids
        piece = self.finish()
        if not self._pending or piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._last, self._pending = self._pending, []
        return piece

    def finish(self) -> str:
        """Return the text that is held back; call it after the last id."""
        before = self._tokenizer.decode(self._last)
        return self._tokenizer.decode(self._last + self._pending)[len(before) :]


def load_tokenizer(name: str, end_of_text: str | None = None) -> TextTokenizer:
    """Load a tokenizer.json file, or "gpt2" (or another name) from the Hugging Face hub.

    Args:
        end_of_text: Special token that ends documents. The default is the one recorded in a
            tokenizer.json of Papilio, or else "<|endoftext|>".

    Raises:
        ValueError: The name is neither, the hub cannot be reached, or there is no end of text.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / TOKENIZER
    if not path.exists():
        if path.suffix == ".json":
            raise FileNotFoundError(
                f"Tokenizer {name!r} must be a tokenizer.json file, which does not exist."
            )
        path = _download(name)
    check_size(path)
    requirement = (
        f"{path} must be a tokenizer.json saved by the tokenizers library; a vocab.json or "
        "merges.txt is not enough"
    )
    data = path.read_bytes()
    tokenizer = _from_json(data, requirement)
    return TextTokenizer(tokenizer, name, end_of_text or _marked_end(data) or END_OF_TEXT)


def _marked_end(data: bytes) -> str | None:
    """Token that a tokenizer.json of Papilio marks as the end of documents, or None."""
    if _ENDS_DOCUMENTS.encode() not in data:
        return None
    added = parse_json(data)["added_tokens"]
    return next((token["content"] for token in added if token.get(_ENDS_DOCUMENTS) is True), None)


def _download(name: str) -> Path:
    remedy = (
        "check the name and the network, pass the path of a tokenizer.json (hf download "
        f"{name} tokenizer.json on another machine), or train one on the text (--train-bpe 16384)"
    )
    with from_hub(f"the tokenizer {name!r}", remedy):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, TOKENIZER))


def gpt2_tokenizer(vocab: Path, merges: Path, end_of_text: str = END_OF_TEXT) -> TextTokenizer:
    """Load GPT-2's tokenizer from the two released files, vocab.json and merges.txt.

    Raises:
        ValueError: A file does not have the expected format.
    """
    shell = Tokenizer(models.BPE())
    shell.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    shell.decoder = decoders.ByteLevel()
    spec = json.loads(shell.to_str())
    requirement = (
        f"{vocab} and {merges.name} next to it must be the vocabulary and the merges of a "
        "byte-level BPE like GPT-2's"
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

    Training takes about 1 s for 5 MB on two cores. The `vocab_size` must be at least 257. A small
    sample may support fewer entries than requested.
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
    """Cut words and white space after every 4,096 characters.

    The dot between the parts is a word of its own, so it adds no pairs to the BPE counts.
    """

    def cut(run: re.Match[str]) -> str:
        starts = range(0, len(run[0]), _MAX_TRAINING_WORD)
        return "\n.\n".join(run[0][start : start + _MAX_TRAINING_WORD] for start in starts)

    return _LONG_WORD.sub(cut, text)


def _from_json(data: bytes, requirement: str) -> Tokenizer:
    with silent_stderr(), tokenizer_errors(requirement=requirement):
        return Tokenizer.from_buffer(data)


def check_bpe_vocab_size(vocab_size: int) -> None:
    """Raise ValueError for a vocabulary that cannot hold every byte."""
    if vocab_size < 257:
        raise ValueError(
            f"train_bpe={vocab_size} must be at least 257: 256 bytes and the end of text."
        )


def _listed(tokens: Iterable[str]) -> str:
    first = list(islice(tokens, _MAX_LISTED + 1))
    return ", ".join(map(repr, first[:_MAX_LISTED])) + (", ..." if first[_MAX_LISTED:] else "")


def _meaning_sha256(spec: dict, end_of_text: str) -> str:
    """Hash everything that determines the ids, so that equivalent files get the same hash."""
    meaning = {
        "normalizer": spec["normalizer"],
        "pre_tokenizer": spec["pre_tokenizer"],
        "added_tokens": [[t["id"], t["content"], t["special"]] for t in spec["added_tokens"]],
        # absent, null, "" and false are four spellings of an unused option
        "model": {key: value for key, value in spec["model"].items() if value},
    }
    if end_of_text != END_OF_TEXT:  # keeps the hashes of older versions for the default
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
    """Whether a byte-level pre-tokenizer has the matching decoder; not in `_meaning_sha256`."""
    encodes = "ByteLevel" in _types(spec["pre_tokenizer"], "pretokenizers")
    decodes = _types(spec["decoder"], "decoders")
    return not encodes or ("ByteLevel" in decodes and decodes <= {"ByteLevel", "Fuse"})


def _types(part: dict | None, inner: str) -> set[str]:
    """Types of a component of a tokenizer; for a sequence, the types of its `inner` components."""
    return {each["type"] for each in (part or {}).get(inner, [part or {"type": "none"}])}

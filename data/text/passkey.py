"""Pass key retrieval: a long text hides pass keys, and questions at its end ask for them.

The task follows Mohtashami and Jaggi 2023, "Landmark Attention" (arXiv 2305.16300), with haystacks
of real text. Each key belongs to a numbered door, so that a text can hold several keys. Prompts of
an exact length are used for evaluation, documents for training.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.text.documents import Document
from data.text.shards import TOKENIZER, TokenStream
from data.text.tokenizer import TextTokenizer, load_tokenizer

NEEDLE = (
    "\nThe pass key of door {door} is {digits}. Remember it. "
    "{digits} is the pass key of door {door}.\n"
)
QUESTION = "\nWhat is the pass key of door {door}? The pass key of door {door} is"
ANSWER = " {digits}."
DOORS = range(100, 1000)
VAL_EVERY = 100


class Key(NamedTuple):
    """Hidden pass key of a door."""

    door: int
    digits: str
    depth: float
    """Relative position in the haystack: 0 at the beginning, 1 at the end."""


class Prompt(NamedTuple):
    """Token ids of a haystack with needles, then questions, then the answer to the last one."""

    tokens: list[int]
    """All token ids, including the answer."""
    n_answer: int
    """Number of answer tokens at the end: the digits only, without the full stop."""


def make_prompt(
    tokenizer: TextTokenizer,
    haystack: np.ndarray,
    keys: Sequence[Key],
    length: int,
    *,
    n_asked: int = 1,
) -> Prompt:
    """Build a prompt of exactly `length` tokens.

    Args:
        haystack: int64 token ids of text, at least `length` of them.
        keys: Keys of different doors, in any order.
        n_asked: The first `n_asked` >= 1 keys are asked for, one after the other.

    Raises:
        ValueError: The length has no room for needles and questions.
    """
    needles = [
        (key.depth, tokenizer.encode(NEEDLE.format(door=key.door, digits=key.digits)))
        for key in keys
    ]
    questions: list[int] = []
    answer: list[int] = []
    for key in keys[:n_asked]:
        # Keep the answer's full stop, as in the needle: some tokenizers merge it with the digits.
        questions += [*answer, *tokenizer.encode(QUESTION.format(door=key.door))]
        answer = tokenizer.encode(ANSWER.format(digits=key.digits))
    del answer[-len(tokenizer.encode(".")) :]
    room = length - sum(len(needle) for _, needle in needles) - len(questions) - len(answer)
    if room < 0:
        raise ValueError(
            f"a prompt of {length} tokens has no room for needles, questions and answers, which "
            f"take {length - room}: choose a longer one"
        )
    tokens: list[int] = []
    start = 0
    for depth, needle in sorted(needles):
        position = round(depth * room)
        tokens += [*haystack[start:position].tolist(), *needle]
        start = position
    tokens += [*haystack[start:room].tolist(), *questions, *answer]
    return Prompt(tokens, len(answer))


def draw_keys(rng: np.random.Generator, depths: Sequence[float]) -> list[Key]:
    """Draw keys of five digits without a leading 0, for different doors."""
    doors = rng.permutation(DOORS)[: len(depths)].tolist()
    digits = rng.integers(10_000, 100_000, len(depths)).tolist()
    return [
        Key(door, str(key), depth) for door, key, depth in zip(doors, digits, depths, strict=True)
    ]


def tokens_of_key(tokenizer: TextTokenizer) -> int:
    """Tokens of a needle, its question and the answer."""
    texts = (text.format(door=999, digits=99_999) for text in (NEEDLE, QUESTION, ANSWER))
    return sum(len(tokenizer.encode(text)) for text in texts)


@dataclass(frozen=True)
class PasskeySource:
    """Source of documents with pass keys and questions for all keys, in text of a prepared corpus.

    Lengths range from slightly more than a needle and its question to `longest` tokens. Each octave
    of lengths has the same total number of tokens. Depths are uniform. Needles and questions take
    at most half of a text. The number of keys is log-uniform: each octave has the same number of
    texts. Some documents are therefore easy, and long ones have many distances between key and
    question. Each document is a pure function of seed and number.

    Raises:
        ValueError: `longest` has no room for a haystack, no document is for validation, or the
            corpus is too small for one document.
    """

    corpus: Path
    n_documents: int
    longest: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_documents < VAL_EVERY:
            raise ValueError(
                f"n_documents={self.n_documents} must be at least {VAL_EVERY}: one in {VAL_EVERY} "
                "documents is for validation."
            )
        if self.longest <= self._shortest:
            raise ValueError(
                f"longest={self.longest} tokens must be above {self._shortest}, most of which are "
                "a needle and its question."
            )
        for split, stream in self._streams.items():
            if len(stream) < self._shortest:
                raise ValueError(
                    f"{split} of {self.corpus} has {len(stream)} tokens, but a document with a key "
                    f"needs {self._shortest}: pass a larger corpus."
                )

    def describe(self) -> dict[str, Any]:
        manifest = self._streams["train"].manifest
        settings = asdict(self) | {"corpus": self.corpus.resolve().name}
        return {"kind": "passkey", **settings, "tokens": manifest.splits["train"].tokens}

    def documents(self, start: int = 0) -> Iterator[Document]:
        for number in range(start, self.n_documents):
            split = "val" if (number + 1) % VAL_EVERY == 0 else "train"
            text = self._text(number, self._streams[split])
            yield Document(number, split, text, (number + 1) / self.n_documents)

    def _text(self, number: int, stream: TokenStream) -> str:
        rng = np.random.default_rng((self.seed, number))
        longest = min(self.longest, len(stream))
        # density 1 / length^2, so that each octave of lengths has the same number of tokens
        length = int(1 / rng.uniform(1 / longest, 1 / self._shortest))
        first = int(rng.integers(0, len(stream) - length + 1))
        max_keys = min(max(1, length // (2 * self._one_key)), len(DOORS))
        n_keys = int(max_keys ** rng.random())
        keys = draw_keys(rng, rng.random(n_keys).tolist())
        haystack = stream.read(first, length)
        prompt = make_prompt(self._tokenizer, haystack, keys, length, n_asked=n_keys)
        eot = stream.manifest.tokenizer.eot_id
        return self._tokenizer.decode([t for t in prompt.tokens if t != eot]) + "."

    @cached_property
    def _one_key(self) -> int:
        return tokens_of_key(self._tokenizer)

    @property
    def _shortest(self) -> int:
        """Minimum number of tokens of a document: one key and a little text."""
        return 16 + self._one_key

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return load_tokenizer(str(self._streams["train"].path / TOKENIZER))

    @cached_property
    def _streams(self) -> dict[str, TokenStream]:
        return {split: TokenStream(self.corpus, split) for split in ("train", "val")}

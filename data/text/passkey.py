"""Pass keys hidden in text: sentences that name a door's number, and at the end questions for it.

The task of Mohtashami and Jaggi 2023, "Landmark Attention" (arXiv 2305.16300), in haystacks of real
text. Keys are those of doors, so that a text can hold several. As prompts of an exact length they
test a model; as documents they teach it.
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
    """What is hidden."""

    door: int
    digits: str
    depth: float
    """Where it stands in the haystack: 0 at the beginning, 1 at the end."""


class Prompt(NamedTuple):
    """A haystack with needles, questions, and the answer to the last of them: token ids."""

    tokens: list[int]
    """All of them, the answer included."""
    n_answer: int
    """Tokens of the answer, at the end: the digits, without what follows."""


def make_prompt(
    tokenizer: TextTokenizer,
    haystack: np.ndarray,
    keys: Sequence[Key],
    length: int,
    *,
    n_asked: int = 1,
) -> Prompt:
    """A prompt of exactly `length` tokens.

    Args:
        haystack: int64 ids of text, as many as the prompt or more.
        keys: of different doors, in any order.
        n_asked: how many keys, the first of them, are asked for, one after the other; at least 1.

    Raises:
        ValueError: the length has no room for needles and questions.
    """
    needles = [
        (key.depth, tokenizer.encode(NEEDLE.format(door=key.door, digits=key.digits)))
        for key in keys
    ]
    questions: list[int] = []
    answer: list[int] = []
    for key in keys[:n_asked]:
        # with what follows it, as in the needle: some tokenizers join what is next to each other
        questions += [*answer, *tokenizer.encode(QUESTION.format(door=key.door))]
        answer = tokenizer.encode(ANSWER.format(digits=key.digits))
    del answer[-len(tokenizer.encode(".")) :]
    room = length - sum(len(needle) for _, needle in needles) - len(questions) - len(answer)
    if room < 0:
        raise ValueError(
            f"a prompt of {length} tokens has no room for needles, questions and answers, which "
            f"take {length - room}: ask for a longer one"
        )
    tokens: list[int] = []
    start = 0
    for depth, needle in sorted(needles):
        place = round(depth * room)
        tokens += [*haystack[start:place].tolist(), *needle]
        start = place
    tokens += [*haystack[start:room].tolist(), *questions, *answer]
    return Prompt(tokens, len(answer))


def draw_keys(rng: np.random.Generator, depths: Sequence[float]) -> list[Key]:
    """Keys of five digits, the first of which is not 0, of different doors."""
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
    """Documents with keys and the questions for all of them; haystacks are of a prepared corpus.

    Lengths are drawn from little more than a needle and its question to `longest` tokens, so that
    one octave has as many tokens as the next, and depths uniformly. At most half of a text are
    needles and questions, and as many texts have one octave of numbers of keys as the next: so
    there are easy ones to begin with, and many distances in the long ones. Each document is a pure
    function of seed and number.

    Raises:
        ValueError: `longest` has no room for a haystack, or no document is for validation,
            or the corpus is too small for one.
    """

    corpus: Path
    n_documents: int
    longest: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_documents < VAL_EVERY:
            raise ValueError(
                f"n_documents={self.n_documents} must be at least {VAL_EVERY}: one of so many is "
                "for validation."
            )
        if self.longest <= self._shortest:
            raise ValueError(
                f"longest={self.longest} tokens must be above {self._shortest}: a needle and its "
                "question take most of those."
            )
        for split, stream in self._streams.items():
            if len(stream) < self._shortest:
                raise ValueError(
                    f"{split} of {self.corpus} has {len(stream)} tokens, and a document with a key "
                    f"needs {self._shortest}: give a larger corpus."
                )

    def describe(self) -> dict[str, Any]:
        manifest = self._streams["train"].manifest
        about = asdict(self) | {"corpus": self.corpus.resolve().name}
        return {"kind": "passkey", **about, "tokens": manifest.splits["train"].tokens}

    def documents(self, start: int = 0) -> Iterator[Document]:
        for number in range(start, self.n_documents):
            split = "val" if (number + 1) % VAL_EVERY == 0 else "train"
            text = self._text(number, self._streams[split])
            yield Document(number, split, text, (number + 1) / self.n_documents)

    def _text(self, number: int, stream: TokenStream) -> str:
        rng = np.random.default_rng((self.seed, number))
        longest = min(self.longest, len(stream))
        length = int(1 / rng.uniform(1 / longest, 1 / self._shortest))
        first = int(rng.integers(0, len(stream) - length + 1))
        most = min(max(1, length // (2 * self._one_key)), len(DOORS))
        n_keys = int(most ** rng.random())
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
        """Tokens of one key, and a few of text."""
        return 16 + self._one_key

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return load_tokenizer(str(self._streams["train"].path / TOKENIZER))

    @cached_property
    def _streams(self) -> dict[str, TokenStream]:
        return {split: TokenStream(self.corpus, split) for split in ("train", "val")}

"""Pass keys hidden in text: a sentence with a number, and at the end the question for it.

The task of Mohtashami and Jaggi 2023, "Landmark Attention" (arXiv 2305.16300), in haystacks of real
text. As prompts of an exact length they test a model; as documents they teach it.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.text.documents import Document, split_of
from data.text.shards import TOKENIZER, TokenStream
from data.text.tokenizer import TextTokenizer, load_tokenizer

NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
ANSWER = " {key}."
VAL_RATIO = 0.01


class Prompt(NamedTuple):
    """A haystack with a needle, the question, and the answer: token ids."""

    tokens: list[int]
    """All of them, the answer included."""
    n_answer: int
    """Tokens of the answer, at the end: the digits, without what follows."""


def make_prompt(
    tokenizer: TextTokenizer, haystack: np.ndarray, key: str, depth: float, length: int
) -> Prompt:
    """A prompt of exactly `length` tokens.

    Args:
        haystack: int64 ids of text, as many as the prompt or more.
        key: digits.
        depth: where the needle stands in the haystack: 0 at its beginning, 1 at its end.

    Raises:
        ValueError: the length has no room for needle and question.
    """
    needle = tokenizer.encode(NEEDLE.format(key=key))
    question = tokenizer.encode(QUESTION)
    # with what follows it, as the needle has it: some tokenizers join what is next to each other
    answer = tokenizer.encode(ANSWER.format(key=key))[: -len(tokenizer.encode("."))]
    room = length - len(needle) - len(question) - len(answer)
    if room < 0:
        raise ValueError(
            f"a prompt of {length} tokens has no room for needle, question and answer, which take "
            f"{length - room}: ask for a longer one"
        )
    place = round(depth * room)
    before, after = haystack[:place].tolist(), haystack[place:room].tolist()
    return Prompt([*before, *needle, *after, *question, *answer], len(answer))


def draw_key(rng: np.random.Generator) -> str:
    """Five digits, the first of which is not 0."""
    return str(rng.integers(10_000, 100_000))


@dataclass(frozen=True)
class PasskeySource:
    """Documents with a needle and its question, whose haystacks are of a prepared corpus.

    Lengths are drawn from little more than needle and question to `longest` tokens, as many of one
    octave as of the next, and depths uniformly. Each is a pure function of seed and number.

    Raises:
        ValueError: `longest` has no room for a haystack, or there are no documents.
    """

    corpus: Path
    n_documents: int
    longest: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_documents < 1:
            raise ValueError(f"n_documents={self.n_documents} must be at least 1.")
        if self.longest <= self._shortest:
            raise ValueError(
                f"longest={self.longest} tokens must be above {self._shortest}: needle and "
                "question take most of those."
            )

    def describe(self) -> dict[str, Any]:
        manifest = self._streams["train"].manifest
        about = asdict(self) | {"corpus": self.corpus.resolve().name}
        return {"kind": "passkey", **about, "tokens": manifest.splits["train"].tokens}

    def documents(self, start: int = 0) -> Iterator[Document]:
        for number in range(start, self.n_documents):
            split = split_of(number, VAL_RATIO)
            text = self._text(number, self._streams[split])
            yield Document(number, split, text, (number + 1) / self.n_documents)

    def _text(self, number: int, stream: TokenStream) -> str:
        rng = np.random.default_rng((self.seed, number))
        octaves = np.log2(self.longest / self._shortest)
        length = min(int(self._shortest * 2 ** rng.uniform(0, octaves)), len(stream))
        first = int(rng.integers(0, len(stream) - length + 1))
        prompt = make_prompt(
            self._tokenizer, stream.read(first, length), draw_key(rng), rng.random(), length
        )
        eot = stream.manifest.tokenizer.eot_id
        return self._tokenizer.decode([t for t in prompt.tokens if t != eot]) + "."

    @cached_property
    def _shortest(self) -> int:
        """Tokens of needle, question and answer, and a few of text."""
        texts = NEEDLE, QUESTION, ANSWER
        return 16 + sum(len(self._tokenizer.encode(text.format(key=99_999))) for text in texts)

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return load_tokenizer(str(self._streams["train"].path / TOKENIZER))

    @cached_property
    def _streams(self) -> dict[str, TokenStream]:
        return {split: TokenStream(self.corpus, split) for split in ("train", "val")}

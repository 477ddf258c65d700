"""Recall tasks in long texts: prompts of an exact length, and documents that teach a task.

A haystack of real text hides the sentences of facts, and questions at its end ask for them. Prompts
are used for evaluation, documents for training. The tasks are those of data/text/recall_tasks.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.text.documents import Document
from data.text.recall_tasks import KEYS, Fact, Task
from data.text.shards import TOKENIZER, TokenStream
from data.text.tokenizer import TextTokenizer, load_tokenizer

VAL_EVERY = 100


class NoRoomError(ValueError):
    """A prompt is too short for its needles, questions and answers, which take `least` tokens."""

    def __init__(self, length: int, least: int) -> None:
        super().__init__(
            f"a prompt of {length} tokens has no room for needles, questions and answers, which "
            f"take {least}: choose a longer one"
        )
        self.least = least


class Prompt(NamedTuple):
    """Token ids of a haystack with needles, then questions, then the answer to the last one."""

    tokens: list[int]
    """All token ids, including the answer."""
    n_answer: int
    """Number of answer tokens at the end: the digits only, without the full stop."""


def make_prompt(
    tokenizer: TextTokenizer,
    haystack: np.ndarray,
    facts: Sequence[Fact],
    length: int,
    *,
    n_asked: int = 1,
) -> Prompt:
    """Build a prompt of exactly `length` tokens.

    Args:
        haystack: int64 token ids of text, at least `length` of them.
        facts: Facts with different names, in any order.
        n_asked: The first `n_asked` >= 1 facts are asked for, one after the other.

    Raises:
        NoRoomError: The length has no room for needles and questions.
    """
    needles = [(depth, tokenizer.encode(text)) for fact in facts for depth, text in fact.sentences]
    questions: list[int] = []
    answer: list[int] = []
    for fact in facts[:n_asked]:
        # Keep the answer's full stop, as in the needle: some tokenizers merge it with the digits.
        questions += [*answer, *tokenizer.encode(fact.question)]
        answer = tokenizer.encode(fact.answer)
    del answer[-len(tokenizer.encode(".")) :]
    room = length - sum(len(needle) for _, needle in needles) - len(questions) - len(answer)
    if room < 0:
        raise NoRoomError(length, length - room)
    tokens: list[int] = []
    start = 0
    for depth, needle in sorted(needles, key=itemgetter(0)):  # stable: keeps the order of a fact
        position = round(depth * room)
        tokens += [*haystack[start:position].tolist(), *needle]
        start = position
    tokens += [*haystack[start:room].tolist(), *questions, *answer]
    return Prompt(tokens, len(answer))


def tokens_of_fact(task: Task, tokenizer: TextTokenizer) -> int:
    """Tokens of the example's sentences, its question and the answer."""
    sentences, question, answer = task.example
    texts = (*(text for _, text in sentences), question, answer)
    return sum(len(tokenizer.encode(text)) for text in texts)


@dataclass(frozen=True)
class PasskeySource:
    """Source of documents with facts and questions for all of them, in text of a prepared corpus.

    Lengths range from slightly more than a fact and its question to `longest` tokens. Each octave
    of lengths has the same total number of tokens. Depths are uniform. Facts and questions take at
    most half of a text, except in the shortest ones, which are lengthened if their facts need it.
    The number of facts is log-uniform: each octave has the same number of texts. Some documents are
    therefore easy, and long ones have many distances between fact and question. Each document is a
    pure function of task, seed and number.

    Raises:
        ValueError: `longest` has no room for a haystack, no document is for validation, or the
            corpus is too small for one document.
    """

    corpus: Path
    n_documents: int
    longest: int
    seed: int = 0
    task: Task = KEYS

    def __post_init__(self) -> None:
        if self.n_documents < VAL_EVERY:
            raise ValueError(
                f"n_documents={self.n_documents} must be at least {VAL_EVERY}: one in {VAL_EVERY} "
                "documents is for validation."
            )
        if self.longest <= self._shortest:
            raise ValueError(
                f"longest={self.longest} tokens must be above {self._shortest}, most of which are "
                f"a {self.task.noun} and its question."
            )
        for split, stream in self._streams.items():
            if len(stream) < self._shortest:
                raise ValueError(
                    f"{split} of {self.corpus} has {len(stream)} tokens, but a document with a "
                    f"{self.task.noun} needs {self._shortest}: pass a larger corpus."
                )

    def describe(self) -> dict[str, Any]:
        manifest = self._streams["train"].manifest
        return {
            "kind": self.task.kind,
            "corpus": self.corpus.resolve().name,
            "n_documents": self.n_documents,
            "longest": self.longest,
            "seed": self.seed,
            "tokens": manifest.splits["train"].tokens,
        }

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
        least = self.task.least
        most = min(max(least, length // (2 * self._one_fact)), self.task.most)
        n = int(least * (most / least) ** rng.random())
        facts = self.task.draw(rng, self.task.random_depths(rng, n))
        make = partial(make_prompt, self._tokenizer, stream.read(first, length), facts, n_asked=n)
        try:
            prompt = make(length)
        except NoRoomError as error:  # these facts are longer than the example
            prompt = make(error.least)
        eot = stream.manifest.tokenizer.eot_id
        return self._tokenizer.decode([t for t in prompt.tokens if t != eot]) + "."

    @cached_property
    def _one_fact(self) -> int:
        return tokens_of_fact(self.task, self._tokenizer)

    @property
    def _shortest(self) -> int:
        """Minimum number of tokens of a document: the fewest facts and a little text."""
        return 16 + self.task.least * self._one_fact

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return load_tokenizer(str(self._streams["train"].path / TOKENIZER))

    @cached_property
    def _streams(self) -> dict[str, TokenStream]:
        return {split: TokenStream(self.corpus, split) for split in ("train", "val")}

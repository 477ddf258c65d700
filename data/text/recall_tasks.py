"""Recall tasks: facts that a long text hides, and the questions that ask for them.

Pass keys follow Mohtashami and Jaggi 2023, "Landmark Attention" (arXiv 2305.16300). Chains have two
hops, as in the variable tracking of RULER (Hsieh et al. 2024, arXiv 2404.06654): one sentence gives
the code of a box, another names the door that this code opens, and the question is about the door.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

NAMES = range(100, 1000)
"""Numbers of doors and boxes."""
ORDERS = {"random": 0.5, "box-first": 1.0, "door-first": 0.0}
"""Orders of the two sentences of a chain: chance that the box's comes first."""


class Fact(NamedTuple):
    """Hidden fact: its sentences, the question for it, and the answer."""

    sentences: tuple[tuple[float, str], ...]
    """Depth and text of each sentence, in order. The depth is the relative position in the text:
    0 at the beginning, 1 at the end."""
    question: str
    answer: str
    """Digits with a full stop."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Kind of facts that a text hides."""

    kind: str
    """Name in the manifests of prepared texts and in file names."""
    noun: str
    """Word for one fact."""
    found: str
    """Heading of the share of correct answers."""
    depth: str
    """Label of the depth of a fact."""
    most: int
    """Maximum number of facts in a text, whose names all differ."""
    least: int
    """Minimum number of facts in a training text."""
    others: int
    """Default number of distractors."""
    example: Fact
    """Typical fact, from whose tokens the lengths of training texts are chosen."""
    draw: Callable[[np.random.Generator, Sequence[float]], list[Fact]]
    """Draw facts with different names whose first sentences are at these depths."""

    def random_depths(self, rng: np.random.Generator, n: int) -> list[float]:
        """Depths of n first sentences, if the depths of all sentences are uniform in [0, 1)."""
        return rng.random((n, len(self.example.sentences))).min(axis=1).tolist()


def key(door: int, digits: int, depth: float) -> Fact:
    """Pass key of a door."""
    needle = (
        f"\nThe pass key of door {door} is {digits}. Remember it. "
        f"{digits} is the pass key of door {door}.\n"
    )
    question = f"\nWhat is the pass key of door {door}? The pass key of door {door} is"
    return Fact(((depth, needle),), question, f" {digits}.")


def chain(door: int, box: int, digits: int, depths: Sequence[float], *, box_first: bool) -> Fact:
    """Code of a box that opens a door. `depths` are those of the first and the later sentence."""
    of_box = (
        f"\nThe code of box {box} is {digits}. Remember it. {digits} is the code of box {box}.\n"
    )
    of_door = (
        f"\nDoor {door} opens with the code of box {box}. Remember it. "
        f"The code of box {box} opens door {door}.\n"
    )
    texts = (of_box, of_door) if box_first else (of_door, of_box)
    question = f"\nWhich code opens door {door}? The code that opens door {door} is"
    return Fact(tuple(zip(depths, texts, strict=True)), question, f" {digits}.")


def draw_keys(rng: np.random.Generator, depths: Sequence[float]) -> list[Fact]:
    """Draw pass keys of different doors at these depths."""
    doors = rng.permutation(NAMES)[: len(depths)].tolist()
    return list(map(key, doors, _digits(rng, len(depths)), depths))


def draw_chains(
    rng: np.random.Generator, depths: Sequence[float], order: str = "random"
) -> list[Fact]:
    """Draw chains with first sentences at these depths. The other sentence is at any later depth.

    No two doors or boxes have the same number.
    """
    n = len(depths)
    names = rng.permutation(NAMES)[: 2 * n].tolist()
    digits = _digits(rng, n)
    both = zip(depths, rng.uniform(depths, 1.0).tolist(), strict=True)
    box_first = (rng.random(n) < ORDERS[order]).tolist()
    return [
        chain(door, box, code, pair, box_first=first)
        for door, box, code, pair, first in zip(
            names[:n], names[n:], digits, both, box_first, strict=True
        )
    ]


def _digits(rng: np.random.Generator, n: int) -> list[int]:
    """Draw n numbers of five digits without a leading 0."""
    return rng.integers(10_000, 100_000, n).tolist()


KEYS = Task(
    kind="passkey",
    noun="key",
    found="keys found",
    depth="depth of the key",
    most=len(NAMES),
    least=1,
    others=0,
    example=key(999, 99_999, 0.0),
    draw=draw_keys,
)
CHAINS = Task(
    kind="chains",
    noun="chain",
    found="codes found",
    depth="depth of the first sentence",
    most=len(NAMES) // 2,
    least=2,  # if a text had a single code, repeating it would need no hop
    others=4,
    example=chain(999, 999, 99_999, (0.0, 0.0), box_first=True),
    draw=draw_chains,
)
TASKS = {"key": KEYS, "chains": CHAINS}


def chains_in_order(order: str) -> Task:
    """Chains with the sentences in one of ORDERS."""
    return replace(CHAINS, draw=partial(draw_chains, order=order))

"""Recall of hidden facts, such as pass keys: accuracy by prompt length and depth in the prompt."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from data.text.passkey import NoRoomError, Prompt, make_prompt
from data.text.recall_tasks import KEYS, Fact, Task
from data.text.shards import TokenStream
from data.text.tokenizer import TextTokenizer
from evaluation.results import Row
from evaluation.statistics import wilson
from model.gpt import GPT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Set of prompts of a recall task.

    Raises:
        ValueError: a depth is outside [0, 1], there is no prompt, or more facts than names.
    """

    lengths: Sequence[int]
    """Prompt lengths in tokens, including the answer."""
    depths: Sequence[float]
    """Positions of the first sentence: 0 is the beginning of the haystack, 1 its end."""
    n: int
    """Number of prompts for each length and depth."""
    others: int = 0
    """Number of distractors: other facts in each prompt, at random depths."""
    seed: int = 0
    task: Task = KEYS

    def __post_init__(self) -> None:
        if not self.lengths or not self.depths or self.n < 1:
            raise ValueError("passkey trials need at least one length, one depth and n=1")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth={depth} must be in [0, 1]: 0 is the beginning")
        if not 0 <= self.others < self.task.most:
            raise ValueError(f"others={self.others} must be in [0, {self.task.most - 1}]")

    def prompts(
        self, tokenizer: TextTokenizer, haystack: TokenStream, length: int, depth: float
    ) -> Iterator[Prompt]:
        """Yield the prompts of one length and depth."""
        for first, facts in self._drawn(haystack, length, depth):
            yield make_prompt(tokenizer, haystack.read(first, length), facts, length)

    def least_length(self, tokenizer: TextTokenizer, haystack: TokenStream) -> int:
        """Prompt length with room for all prompts, above the longest of `lengths` without.

        Facts differ a little in tokens, and those of a prompt depend on its length.
        """

        def needed(length: int) -> int:
            least = length
            for depth in self.depths:
                for first, facts in self._drawn(haystack, length, depth):
                    try:
                        make_prompt(tokenizer, haystack.read(first, length), facts, length)
                    except NoRoomError as error:
                        least = max(least, error.least)
            return least

        length = max((length for length in self.lengths if needed(length) > length), default=1)
        while length <= len(haystack) and (more := needed(length)) > length:
            length = more
        return length

    def _drawn(
        self, haystack: TokenStream, length: int, depth: float
    ) -> Iterator[tuple[int, list[Fact]]]:
        """Yield the start of the filler text in the haystack, and the facts, of each prompt."""
        for number in range(self.n):
            rng = np.random.default_rng((self.seed, length, round(1000 * depth), number))
            first = int(rng.integers(0, len(haystack) - length + 1))
            yield first, self.task.draw(rng, [depth, *self.task.random_depths(rng, self.others)])


@torch.no_grad()
def answered_correctly(model: GPT, prompts: Tensor, n_answer: Tensor) -> Tensor:
    """(B,) bool: whether greedy decoding yields the answer at the end of each prompt.

    One forward pass reads the prompt together with its answer. Greedy decoding yields the answer if
    each of its tokens is the most likely one after those before it.

    Args:
        prompts: (B, T) int64, including the answers.
        n_answer: (B,) int64, number of tokens in each answer.
    """
    longest = int(n_answer.max())
    hidden = model.hidden(prompts[:, :-1])[:, -longest:]
    predictions = model.head(hidden).argmax(-1)
    # shorter answers are right-aligned: ignore the tokens before them
    position = torch.arange(longest, device=prompts.device)
    is_answer = position >= longest - n_answer[:, None]
    return ((predictions == prompts[:, -longest:]) | ~is_answer).all(1)


def score(
    model: GPT,
    tokenizer: TextTokenizer,
    haystack: TokenStream,
    trials: Trials,
    *,
    batch_tokens: int,
    context: Callable[[], AbstractContextManager],
) -> Iterator[Row]:
    """Yield a row for each length and depth: answers found, prompts, and the accuracy's interval.

    All are None if the sentences do not fit into a prompt, or a prompt not into learned positions.
    All models get the same prompts: these depend only on trials, tokenizer and haystack.

    Args:
        model: the model, in evaluation mode.
        tokenizer: tokenizer of the model.
        haystack: source of the filler text.
        trials: lengths and depths of the prompts.
        batch_tokens: tokens per forward pass, which reads at least one prompt.
        context: context manager for the forward pass, such as autocast.

    Raises:
        ValueError: a prompt is longer than the haystack.
    """
    device = next(model.parameters()).device
    longest = max(trials.lengths)
    if longest > len(haystack):
        raise ValueError(
            f"prompts of {longest} tokens must not be longer than the text: {haystack.split} of "
            f"{haystack.path} has {len(haystack)} tokens. Try shorter lengths or another corpus"
        )
    # the last token is only predicted
    is_bounded = model.config.positions == "learned"
    most = model.config.context_length + 1 if is_bounded else longest
    for length in trials.lengths:
        for depth in trials.depths:
            row: Row = {"length": length, "depth": depth}
            prompts: list[Prompt] = []
            if length <= most:
                with suppress(NoRoomError):
                    prompts = [*trials.prompts(tokenizer, haystack, length, depth)]
            if not prompts:
                yield row | dict.fromkeys(("found", "of", "low", "high"))
                continue
            batch_size = max(1, batch_tokens // length)
            n_found = 0
            for first in range(0, trials.n, batch_size):
                batch = prompts[first : first + batch_size]
                tokens = torch.tensor([p.tokens for p in batch], device=device)
                n_answer = torch.tensor([p.n_answer for p in batch], device=device)
                with context():
                    n_found += int(answered_correctly(model, tokens, n_answer).sum())
            yield row | _accuracy(n_found, trials.n)


def _accuracy(n_found: int, n_prompts: int) -> Row:
    """Counts of an accuracy, with its 95% interval."""
    low, high = wilson(n_found / n_prompts, n_prompts)
    return {"found": n_found, "of": n_prompts, "low": low, "high": high}


def lengths_that_fit(rows: Sequence[Row]) -> list[Row]:
    """Rows of the lengths that were measured at all depths, or of the longest if there is none."""
    partial = {row["length"] for row in rows if row["of"] is None}
    longest = max(row["length"] for row in rows)
    return [row for row in rows if row["length"] not in partial] or [
        row for row in rows if row["length"] == longest
    ]


def by_length(rows: Sequence[Row]) -> list[Row]:
    """Merge the rows of all depths of each length that was measured."""
    rows = [row for row in rows if row["of"] is not None]
    lengths = dict.fromkeys(row["length"] for row in rows)
    merged = []
    for length in lengths:
        n_found = sum(row["found"] for row in rows if row["length"] == length)
        n_prompts = sum(row["of"] for row in rows if row["length"] == length)
        merged.append({"length": length, **_accuracy(n_found, n_prompts)})
    return merged


def draw(
    runs: Mapping[str, Sequence[Row]], columns: int | None = None, task: Task = KEYS
) -> "Figure":
    """Draw a heat map for each run: percentage found, by length (down) and depth (across).

    Lengths that were not measured are left empty.

    `columns` is the number of heat maps per line; None puts all of them in one line.
    """
    from matplotlib.figure import Figure

    columns = columns or len(runs)
    lines = -(-len(runs) // columns)
    figure = Figure(figsize=(4.2 * columns + 0.8, 0.6 + 3.0 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in panels[len(runs) :]:
        axes.set_visible(False)
    image = None
    for axes, (label, rows) in zip(panels, runs.items(), strict=False):
        lengths = sorted({row["length"] for row in rows})
        depths = sorted({row["depth"] for row in rows})
        percent = np.full((len(lengths), len(depths)), np.nan)
        for row in rows:
            if row["of"] is None:
                continue
            cell = lengths.index(row["length"]), depths.index(row["depth"])
            percent[cell] = 100 * row["found"] / row["of"]
            colour = "white" if percent[cell] < 60 else "black"
            text = f"{percent[cell]:.0f}"
            axes.text(*cell[::-1], text, ha="center", va="center", size=8, color=colour)
        image = axes.imshow(percent, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
        axes.set_yticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_title(label, fontsize=10)
        axes.set_xlabel(task.depth)
        axes.set_ylabel("tokens")
    assert image is not None
    figure.colorbar(image, ax=panels.tolist(), label=f"{task.found}, of 100")
    return figure

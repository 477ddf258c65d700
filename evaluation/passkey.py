"""Whether a model finds a pass key in a long text, by the text's length and the key's depth."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from data.text.passkey import DOORS, Prompt, draw_keys, make_prompt
from data.text.shards import TokenStream
from data.text.tokenizer import TextTokenizer
from evaluation.results import Row
from evaluation.statistics import wilson
from model.gpt import GPT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What is asked of a model.

    Raises:
        ValueError: a depth is outside of [0, 1], there is nothing to ask, or more keys than doors.
    """

    lengths: Sequence[int]
    """Tokens of a prompt, the answer included."""
    depths: Sequence[float]
    """Of the needle: 0 at the beginning of the haystack, 1 at its end."""
    n: int
    """Prompts of each length and depth."""
    others: int = 0
    """Keys of other doors in each prompt, at any depth, for which is not asked."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or not self.depths or self.n < 1:
            raise ValueError("passkey trials need a length, a depth and one prompt of each")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth={depth} must lie in [0, 1]: 0 is the beginning")
        if not 0 <= self.others < len(DOORS):
            raise ValueError(f"others={self.others} must lie in [0, {len(DOORS) - 1}]")

    def prompts(
        self, tokenizer: TextTokenizer, haystack: TokenStream, length: int, depth: float
    ) -> Iterator[Prompt]:
        """Yield the prompts of a length and depth."""
        for number in range(self.n):
            rng = np.random.default_rng((self.seed, length, round(1000 * depth), number))
            first = int(rng.integers(0, len(haystack) - length + 1))
            keys = draw_keys(rng, [depth, *rng.random(self.others).tolist()])
            yield make_prompt(tokenizer, haystack.read(first, length), keys, length)


@torch.no_grad()
def answers(model: GPT, prompts: Tensor, n_answer: Tensor) -> Tensor:
    """(B,) bool, whether greedy decoding gives the answer at the end of each prompt.

    The answer's own tokens are read along: where each of them is the likeliest after those before,
    greedy decoding gives them all.

    Args:
        prompts: (B, T) int64, with their answers.
        n_answer: (B,) int64, tokens of the answer.
    """
    most = int(n_answer.max())
    hidden = model.hidden(prompts[:, :-1])[:, -most:]
    likeliest = model.head(hidden).argmax(-1)
    place = torch.arange(most, device=prompts.device)
    counts = place >= most - n_answer[:, None]
    return ((likeliest == prompts[:, -most:]) | ~counts).all(1)


def score(
    model: GPT,
    tokenizer: TextTokenizer,
    haystack: TokenStream,
    trials: Trials,
    *,
    batch_tokens: int,
    context: Callable[[], AbstractContextManager],
) -> Iterator[Row]:
    """A row for each length and depth: how many keys of how many are found, with the interval.

    Every model is asked the same: prompts depend on trials, tokenizer and haystack alone.

    Args:
        model: in evaluation mode.
        haystack: of which the text is.
        batch_tokens: read at once, or one prompt.
        context: of the forward pass.

    Raises:
        ValueError: a length is more than the haystack, or than learned positions have.
    """
    device = next(model.parameters()).device
    longest = max(trials.lengths)
    if longest > len(haystack):
        raise ValueError(
            f"prompts of {longest} tokens need as much text, and {haystack.split} of "
            f"{haystack.path} has {len(haystack)}: give another corpus, or shorter lengths"
        )
    for length in trials.lengths:
        for depth in trials.depths:
            prompts = list(trials.prompts(tokenizer, haystack, length, depth))
            at_once = max(1, batch_tokens // length)
            found = 0
            for first in range(0, trials.n, at_once):
                some = prompts[first : first + at_once]
                tokens = torch.tensor([p.tokens for p in some], device=device)
                n_answer = torch.tensor([p.n_answer for p in some], device=device)
                with context():
                    found += int(answers(model, tokens, n_answer).sum())
            yield {"length": length, "depth": depth, **_share(found, trials.n)}


def _share(found: int, of: int) -> Row:
    low, high = wilson(found / of, of)
    return {"found": found, "of": of, "low": low, "high": high}


def by_length(rows: Sequence[Row]) -> list[Row]:
    """Rows of all depths of each length together."""
    lengths = dict.fromkeys(row["length"] for row in rows)
    joined = []
    for length in lengths:
        found = sum(row["found"] for row in rows if row["length"] == length)
        of = sum(row["of"] for row in rows if row["length"] == length)
        joined.append({"length": length, **_share(found, of)})
    return joined


def draw(runs: Mapping[str, Sequence[Row]], columns: int | None = None) -> "Figure":
    """A heat map for each run: keys found of 100 by length (down) and depth (across).

    All in one line, or `columns` in each.
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
        shares = np.full((len(lengths), len(depths)), np.nan)
        for row in rows:
            at = lengths.index(row["length"]), depths.index(row["depth"])
            shares[at] = 100 * row["found"] / row["of"]
            colour = "white" if shares[at] < 60 else "black"
            axes.text(
                *at[::-1], f"{shares[at]:.0f}", ha="center", va="center", size=8, color=colour
            )
        image = axes.imshow(shares, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
        axes.set_yticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_title(label, fontsize=10)
        axes.set_xlabel("depth of the key")
        axes.set_ylabel("tokens")
    assert image is not None
    figure.colorbar(image, ax=panels.tolist(), label="keys found, of 100")
    return figure

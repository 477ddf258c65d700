"""Continue a text. Shapes: B batch, T tokens, V vocab.

`stream` yields tokens as they are drawn; `generate` collects them.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal, TypedDict, Unpack, get_args

import torch
from torch import Tensor

from model.cache import KVCache
from model.gpt import GPT

PastContext = Literal["slide", "refuse"]


class DrawOptions(TypedDict, total=False):
    """The keyword arguments of `stream`, for those who pass them on."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None
    past_context: PastContext
    stop_id: int | None
    cached: bool


def generate(
    model: GPT, tokens: Tensor, max_new_tokens: int, **options: Unpack[DrawOptions]
) -> Tensor:
    """Append tokens drawn from the model; arguments and errors are those of `stream`.

    Returns:
        (B, T + n) int64: the prompts and the n tokens that `stream` yields after them.
    """
    drawn = stream(model, tokens, max_new_tokens, **options)
    return torch.cat((tokens, *(column[:, None] for column in drawn)), dim=1)


def stream(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    past_context: PastContext = "slide",
    stop_id: int | None = None,
    cached: bool = True,
) -> Iterator[Tensor]:
    """Draw one token after another from the model.

    A token is drawn from what the model makes of a window of the text, which ends just before it
    and begins where `window_start` says; nothing earlier counts. Rows of a batch do not see each
    other, so a greedy row is what its prompt alone would give, up to rounding. Draws of a batch
    come from one generator: with the same seed, the same batch gives the same tokens, and a row
    of another batch other ones.

    Args:
        model: on the device of `tokens`. It is in evaluation mode, without dropout, until the
            iterator is exhausted or closed, and then in the mode that it had.
        tokens: (B, T) int64 prompts, T at least 1.
        max_new_tokens: how many to draw for each row.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: draw from the k likeliest tokens only; None draws from all.
        top_p: draw from the nucleus only (Holtzman et al., arXiv 1904.09751): of the likeliest
            tokens the fewest whose probabilities add up to p or more, at least one. They are the
            probabilities after temperature and top_k. None draws from all.
        seed: makes the draws repeatable; None uses torch's global generator.
        past_context: what to do with a text of more than `context_length` tokens, whatever the
            positions. "slide" moves the window; "refuse" raises before anything is drawn.
        stop_id: token that ends a row: having drawn it, the row repeats it, and once all rows
            have, the iterator ends. In a prompt it ends nothing. None ends no row.
        cached: keep keys and values, so that a token costs the pass of one token, but where the
            window has moved. False runs the whole window for every token: the same numbers up to
            rounding, to test against.

    Yields:
        (B,) int64, the next token of every row.

    Raises:
        ValueError: an argument outside its range, or a text that is too long with "refuse". All
            are raised by the call, not by the first token.
    """
    # checked here and not in `_draw`, which runs only when it is asked for its first token
    context_length, vocab_size = model.config.context_length, model.config.vocab_size
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"tokens have shape {tuple(tokens.shape)} and must be (batch, tokens) with at least "
            "one token: start an empty prompt with the end-of-text token."
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 0.")
    if past_context not in get_args(PastContext):
        raise ValueError(
            f"past_context={past_context!r} must be one of {', '.join(get_args(PastContext))}."
        )
    if past_context == "refuse" and tokens.shape[1] + max_new_tokens > context_length:
        raise ValueError(
            f"a prompt of {tokens.shape[1]} tokens and {max_new_tokens} to add make "
            f"{tokens.shape[1] + max_new_tokens}, more than model.context_length="
            f"{context_length}: shorten the prompt, ask for fewer, or let the window slide "
            "instead of past_context=refuse."
        )
    if not 0.0 <= temperature < math.inf:
        raise ValueError(
            f"temperature={temperature} must be finite and at least 0; 0 takes the likeliest token."
        )
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(
            f"top_k={top_k} must lie between 1 and model.vocab_size={vocab_size}; leave it out to "
            "draw from every token."
        )
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(
            f"top_p={top_p} is a probability above 0 and up to 1; leave it out to draw from every "
            "token."
        )
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed} must lie in [0, 2^63).")
    if stop_id is not None and not 0 <= stop_id < vocab_size:
        raise ValueError(
            f"stop_id={stop_id} must lie between 0 and {vocab_size - 1}, the last token of the "
            "model; leave it out to stop at none."
        )
    generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:
        if temperature == 0.0:
            return logits.argmax(dim=-1)
        p = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        return torch.multinomial(p, num_samples=1, generator=generator)[:, 0]

    return _draw(model, tokens, max_new_tokens, choose, stop_id, cached)


def window_start(length: int, context_length: int) -> int:
    """Where the window begins from which a text of `length` tokens is continued.

    The whole text, as long as it fits into the context. A window that is full and gets one more
    token is cut to its last context_length // 2, at least 1, and grows again. With a context of 4:

        length    1  2  3  4  5  6  7  8  9
        start     0  0  0  0  3  3  3  6  6

    Moving it token by token instead would change every position at every token, and so every key:
    nothing of a cache could be kept. This way the model reads less than two tokens for each one
    drawn. Only the length counts, not how much of it was the prompt, so going on with a text that
    was generated is the same as having asked for more tokens at once; and of a prompt longer than
    the context the model reads between half a context and a whole one.
    """
    keep = max(1, context_length // 2)
    step = context_length + 1 - keep
    return max(0, -(-(length - context_length) // step)) * step  # rounded up


def probabilities(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """(B, V) logits to the (B, V) probabilities that `stream` draws from, at a temperature above 0.

    Tokens that top_k or top_p leaves out have 0. Of equally likely ones at the border, it is not
    said which stay.
    """
    logits = logits.double()  # in which no temperature is so low that all are infinite
    logits = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).float()
    if top_k is not None:
        kept, candidates = logits.topk(top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, candidates, kept)
    if top_p is not None and top_p < 1.0:  # rounded sums could leave out something at 1
        descending, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        likelier = descending.cumsum(dim=-1, dtype=torch.float64) - descending
        outside = torch.zeros_like(likelier, dtype=torch.bool).scatter(-1, order, likelier >= top_p)
        logits = logits.masked_fill(outside, -math.inf)
    return logits.softmax(dim=-1)


# Not inference_mode: nothing could be trained on the tokens that it yields. As a decorator, it
# leaves the mode of whoever takes the tokens alone.
@torch.no_grad()
def _draw(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    choose: Callable[[Tensor], Tensor],
    stop_id: int | None,
    cached: bool,
) -> Iterator[Tensor]:
    """The tokens that `stream` yields; `choose` makes (B,) tokens of (B, V) logits."""
    B, T = tokens.shape
    context_length = model.config.context_length
    text = torch.cat((tokens, tokens.new_empty(B, max_new_tokens)), dim=1)
    capacity = min(context_length, text.shape[1])
    cache = KVCache(model.config.n_layer, capacity) if cached else None
    stopped = torch.zeros(B, dtype=torch.bool, device=tokens.device)
    was_training = model.training
    model.eval()
    try:
        for length in range(T, T + max_new_tokens):
            start = window_start(length, context_length)
            if cache is None:
                unread = text[:, start:length]
            else:
                if start != window_start(length - 1, context_length):
                    cache.reset()
                unread = text[:, start + cache.length : length]
            logits = model.head(model.hidden(unread, cache=cache)[:, -1])
            # Of the first token alone, as to look waits for the GPU: broken weights show at once.
            if length == T and not logits.isfinite().all():
                raise FloatingPointError(
                    "the model's logits are not finite: it is broken, take an earlier checkpoint"
                )
            following = choose(logits)
            if stop_id is not None:
                following = following.masked_fill(stopped, stop_id)
                stopped |= following == stop_id
            text[:, length] = following
            yield following
            if stop_id is not None and stopped.all():
                return
    finally:
        model.train(was_training)

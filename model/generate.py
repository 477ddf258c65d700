"""Text generation. Shapes: B batch, T tokens, V vocab.

`stream` yields tokens as they are sampled; `generate` collects them.
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
    """Keyword arguments of `stream`, for functions that forward them."""

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
    """Sample tokens from the model and append them; arguments and errors are those of `stream`.

    Returns:
        (B, T + n) int64: the prompts, followed by the n tokens that `stream` yields.
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
    """Sample one token after another from the model.

    The model reads a window of the text, which ends just before the new token and begins at
    `window_start`. Rows of a batch are independent, so a greedy row is what its prompt alone would
    give, up to rounding. All rows sample from one generator: the same seed and the same batch give
    the same tokens, but a row gets other tokens in another batch.

    Args:
        model: on the device of `tokens`. It is set to evaluation mode, without dropout. Once the
            iterator is exhausted or closed, its previous mode is restored.
        tokens: (B, T) int64 prompts, T at least 1.
        max_new_tokens: number of tokens to sample for each row.
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: sample from the k most likely tokens only; None samples from all.
        top_p: nucleus sampling (Holtzman et al., arXiv 1904.09751): sample from the fewest most
            likely tokens, at least one, whose probabilities add up to p or more. These are the
            probabilities after temperature and top_k. None samples from all.
        seed: makes the samples reproducible; None uses torch's global generator.
        past_context: how to handle a text of more than `context_length` tokens, with any kind of
            positions. "slide" moves the window; "refuse" raises an error before the first token.
        stop_id: token that ends a row. Once sampled, it is repeated in that row, and the iterator
            ends when all rows have ended. It has no effect in a prompt. None never ends a row.
        cached: use a KV cache, so that a token costs the forward pass of one token, except when
            the window moves. False reads the whole window for every token, which gives the same
            numbers up to rounding. It is meant for tests.

    Yields:
        (B,) int64, the next token of every row.

    Raises:
        ValueError: an argument is out of range, or the text is too long with "refuse". The call
            itself raises, not the first token.
    """
    # Checked here and not in `_draw`, which is a generator and runs only from the first token on.
    context_length, vocab_size = model.config.context_length, model.config.vocab_size
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"tokens have shape {tuple(tokens.shape)} and must be (batch, tokens) with at least "
            "one token. For an empty prompt, pass the end-of-text token."
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 0.")
    if past_context not in get_args(PastContext):
        raise ValueError(
            f"past_context={past_context!r} must be one of {', '.join(get_args(PastContext))}."
        )
    if past_context == "refuse" and tokens.shape[1] + max_new_tokens > context_length:
        raise ValueError(
            f"a prompt of {tokens.shape[1]} tokens and {max_new_tokens} new ones make "
            f"{tokens.shape[1] + max_new_tokens}, more than model.context_length="
            f"{context_length}: shorten the prompt, generate fewer tokens, or let the window slide "
            "with past_context='slide' (--past-context slide)."
        )
    if not 0.0 <= temperature < math.inf:
        raise ValueError(
            f"temperature={temperature} must be finite and at least 0. Use 0 for the most likely "
            "token."
        )
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(
            f"top_k={top_k} must be between 1 and model.vocab_size={vocab_size}. Leave it out to "
            "sample from all tokens."
        )
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(
            f"top_p={top_p} must be above 0 and at most 1. Leave it out to sample from all tokens."
        )
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed} must be in [0, 2^63).")
    if stop_id is not None and not 0 <= stop_id < vocab_size:
        raise ValueError(
            f"stop_id={stop_id} must be between 0 and {vocab_size - 1}, the model's last token id. "
            "Leave it out to never stop."
        )
    generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:
        if temperature == 0.0:
            return logits.argmax(dim=-1)
        p = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        return torch.multinomial(p, num_samples=1, generator=generator)[:, 0]

    return _draw(model, tokens, max_new_tokens, choose, stop_id, cached)


def window_start(length: int, context_length: int) -> int:
    """Return where the window begins that the model reads to continue a text of `length` tokens.

    As long as the text fits into the context, the window is the whole text. When a full window gets
    one more token, it is cut to its last context_length // 2 tokens, at least 1, and grows again.
    With a context of 4:

        length    1  2  3  4  5  6  7  8  9
        start     0  0  0  0  3  3  3  6  6

    A window that moves token by token would change every position, and so every key, at every
    token, which makes a cache useless. This way the model reads fewer than two tokens for each one
    that it samples. The start depends on the length alone, not on how much of it was the prompt.
    So continuing a generated text equals generating more tokens at once. If a prompt is longer than
    the context, the model reads between half a context and a whole one.
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
    """Convert logits (B, V) to the probabilities (B, V) that `stream` samples from.

    The temperature must be above 0. Tokens that top_k or top_p excludes have probability 0. It is
    unspecified which of several equally likely tokens at the limit are excluded.
    """
    logits = logits.double()  # so that a low temperature does not make all of them infinite
    logits = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).float()
    if top_k is not None:
        kept, candidates = logits.topk(top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, candidates, kept)
    if top_p is not None and top_p < 1.0:  # at 1, rounded sums could exclude a token
        descending, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        likelier = descending.cumsum(dim=-1, dtype=torch.float64) - descending
        outside = torch.zeros_like(likelier, dtype=torch.bool).scatter(-1, order, likelier >= top_p)
        logits = logits.masked_fill(outside, -math.inf)
    return logits.softmax(dim=-1)


# Not inference_mode, because a model could not be trained on tokens created in it. Used as a
# decorator, no_grad does not affect the code that consumes the tokens.
@torch.no_grad()
def _draw(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    choose: Callable[[Tensor], Tensor],
    stop_id: int | None,
    cached: bool,
) -> Iterator[Tensor]:
    """Generate the tokens that `stream` yields; `choose` maps (B, V) logits to (B,) tokens."""
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
            # Checked for the first token only, because the check waits for the GPU. Broken weights
            # show there already.
            if length == T and not logits.isfinite().all():
                raise FloatingPointError(
                    "the model's logits are not finite: it is broken, use an earlier checkpoint"
                )
            next_token = choose(logits)
            if stop_id is not None:
                next_token = next_token.masked_fill(stopped, stop_id)
                stopped |= next_token == stop_id
            text[:, length] = next_token
            yield next_token
            if stop_id is not None and stopped.all():
                return
    finally:
        model.train(was_training)

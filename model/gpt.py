"""GPT-2, ready for long contexts: no mask buffers, and attention that never stores T x T scores.

The architecture is that of Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners"; what came after it, from rotary positions to gates, are options.
Shapes: B batch, T tokens, C n_embd, V vocab.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import index
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import ContextGroup
from kernels.fused.cross_entropy import linear_cross_entropy
from kernels.mask.block_mask import BlockSparseMask
from model.block import INIT_STD, Block, init_linear_and_norm
from model.cache import KVCache
from model.config import ModelConfig
from model.memory import check_memory
from model.positions import rotary_tables
from model.residual import Pending, add, make_norm, normalise


class GPT(nn.Module):
    """A decoder-only language model whose head shares the token embedding's weights."""

    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        check_memory(config, config.padded_vocab_size + config.context_length)
        self.tok_emb = nn.Embedding(config.padded_vocab_size, config.n_embd)
        if config.positions == "learned":
            self.pos_emb = nn.Embedding(config.context_length, config.n_embd)
        else:
            # Made once: left to torch.compile, every element of q and k computes its own angle.
            cos, sin = self._rotary_tables(torch.arange(config.context_length))
            self.register_buffer("rotary_cos", cos, persistent=False)
            self.register_buffer("rotary_sin", sin, persistent=False)
        self.emb_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = make_norm(config)
        self.context = ContextGroup()
        self._masks: dict[int, BlockSparseMask | None] = {}
        self.prepare_mask(config.context_length)
        self.init_weights()

    @classmethod
    def with_weights(cls, config: ModelConfig, weights: Mapping[str, Tensor]) -> Self:
        """Make a model of copies of these weights; no others are drawn."""
        with torch.device("meta"):
            model = cls(config)
        # copies, as tensors of a file may be mapped: a file that shrinks would end the process
        copies = {name: weight.clone() for name, weight in weights.items()}
        model.load_state_dict(copies, assign=True)
        if config.positions != "learned":
            positions = torch.arange(config.context_length)
            model.rotary_cos, model.rotary_sin = model._rotary_tables(positions)
        model.prepare_mask(config.context_length)
        return model

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw every parameter as GPT-2 does, from torch's global generator.

        The layers as in `init_linear_and_norm`, embeddings with a standard deviation of 0.02.
        Padded rows of the embedding are 0, and stay so: no gradient reaches them.
        """
        init_linear_and_norm(self, self.config.n_layer)
        # padding draws no numbers, so vocab_multiple does not change what a seed gives here
        nn.init.normal_(self.tok_emb.weight[: self.config.vocab_size], std=INIT_STD)
        nn.init.zeros_(self.tok_emb.weight[self.config.vocab_size :])
        if self.config.positions == "learned":
            nn.init.normal_(self.pos_emb.weight, std=INIT_STD)

    def share_sequences(self, context: ContextGroup) -> None:
        """From now on take of each sequence what `context.shard` gives this process.

        So tokens and targets, and positions in the whole sequence in doc_start. All processes of
        the group must call the model together; what it gives is of its own tokens.
        """
        self.context = context
        for block in self.blocks:
            assert isinstance(block, Block)
            block.attn.context = context if context.size > 1 else None

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        doc_start: Tensor | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> Tensor:
        """Logits, or, given targets, the cross-entropy loss.

        Args:
            tokens: (B, T) int64 ids below `config.vocab_size`. The data readers check the ids;
                here that would stall the GPU.
            targets: (B, S) int64, what follows each of the last S <= T `tokens`; -100 is not
                counted.
            doc_start: as in `hidden`.
            reduction: the loss is the mean over the counted targets, their sum, or "none" of it:
                the loss of each target, 0 where it is not counted, from float32 logits also under
                autocast.

        Returns:
            (B, T, V) logits without targets, else the loss in nats, float32 (float64 of a float64
            model): a scalar, or (B, S) with reduction="none". The mean of no targets at all is NaN.

        Raises:
            ValueError: tokens that are not (B, T), targets that are not (B, S), doc_start of
                another shape, or, with learned positions, more tokens than
                `config.context_length`.
        """
        x, pending = self._stream(tokens, doc_start, None)
        if targets is None:
            return self.head(self._normalised(x, pending))
        fits = targets.dim() == 2 and targets.shape[0] == tokens.shape[0]
        if not fits or not 1 <= targets.shape[1] <= tokens.shape[1]:
            raise ValueError(
                f"targets have shape {tuple(targets.shape)} and tokens {tuple(tokens.shape)}: "
                "each of the last tokens needs one target (-100 where none counts)."
            )
        return self._loss(x, pending, targets, reduction)

    def _loss(
        self,
        x: Tensor,
        pending: Pending | None,
        targets: Tensor,
        reduction: Literal["mean", "sum", "none"],
    ) -> Tensor:
        """What `forward` returns of the last block's output."""
        hidden = self._normalised(x, pending)[:, -targets.shape[1] :]
        whole: AbstractContextManager = nullcontext()
        if reduction == "none":
            # Single losses are for statistics, where logits rounded to bfloat16 would be noise.
            hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
            whole = torch.autocast(x.device.type, enabled=False)
        with whole:
            return linear_cross_entropy(
                hidden,
                self.tok_emb.weight,
                targets,
                reduction=reduction,
                vocab_size=self.config.vocab_size,
            )

    def hidden(
        self, tokens: Tensor, *, doc_start: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """The states that the head reads.

        Args:
            tokens: (B, T) int64 ids.
            doc_start: (B, T) int32, the position in its row at which each token's document begins.
                A token then sees nothing before that, and learned positions count from there, as
                if each document were a sequence of its own. None: a row is one document.
            cache: what came before `tokens`; they are appended to it. Positions go on from its
                length, and learned ones end at `config.context_length` all the same.

        Returns:
            (B, T, C); raises as `forward` and `KVCache.append` do, and ValueError for a cache
            together with documents, or with several new tokens under a block mask.
        """
        return self._normalised(*self._stream(tokens, doc_start, cache))

    def _normalised(self, x: Tensor, pending: Pending | None) -> Tensor:
        return normalise(add(x, pending), self.ln_f)

    def _stream(
        self, tokens: Tensor, doc_start: Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, Pending | None]:
        """The residual stream behind the last block and what is to be added to it."""
        if tokens.dim() != 2:
            raise ValueError(
                f"tokens have shape {tuple(tokens.shape)} and must be (batch, tokens)."
            )
        if doc_start is not None and doc_start.shape != tokens.shape:
            raise ValueError(
                f"doc_start has shape {tuple(doc_start.shape)} and tokens {tuple(tokens.shape)}: "
                "every token needs the position at which its document begins."
            )
        if doc_start is not None and cache is not None:
            raise ValueError("doc_start and cache exclude each other: generate one document a row.")
        if self.context.size > 1 and cache is not None:
            raise ValueError("a cache is of one process, and here several share each sequence.")
        past = 0 if cache is None else cache.length
        seq_len = past + self.context.size * tokens.shape[1]
        x, rotary = self._embed(tokens, past, doc_start)
        mask = self._mask(past, seq_len)
        pending = None
        for block in self.blocks:
            x, pending = block(x, pending, rotary, mask=mask, doc_start=doc_start, cache=cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return x, pending

    def _embed(
        self, tokens: Tensor, past: int, doc_start: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The first block's input, and the tables of rotary positions if they are such."""
        seq_len = past + self.context.size * tokens.shape[1]
        positions = past + self.context.positions(tokens.shape[1], tokens.device)
        x = self.tok_emb(tokens)
        if self.config.positions == "learned":
            if seq_len > self.config.context_length:
                raise ValueError(
                    f"a sequence of {seq_len} tokens is longer than model.context_length="
                    f"{self.config.context_length}, and learned positions end there: raise "
                    "model.context_length, or set model.positions=rotary."
                )
            x = x + self.pos_emb(positions if doc_start is None else positions - doc_start)
            rotary = None
        elif seq_len <= self.config.context_length:
            at = positions if self.context.size > 1 else slice(past, seq_len)
            rotary = self.rotary_cos[at], self.rotary_sin[at]
        else:
            rotary = self._rotary_tables(positions)
        device = x.device.type
        if torch.is_autocast_enabled(device) and not self.config.residual_in_fp32:
            # what the layers add to: autocast alone would leave it in float32
            x = x.to(torch.get_autocast_dtype(device))
        return self.emb_dropout(x), rotary

    def _rotary_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        return rotary_tables(positions, config.head_dim, config.rope_base, config.rope_scaling)

    def _mask(self, past: int, seq_len: int) -> BlockSparseMask | None:
        """The mask of the queries [past, seq_len), which see keys from 0 on."""
        if self.config.mask.pattern == "dense":
            return None
        if past == 0:
            if not torch.compiler.is_compiling():
                self.prepare_mask(seq_len)
            return self._masks[index(seq_len)]  # a number, where torch.compile has a variable
        if seq_len - past > 1:
            raise ValueError(
                f"{seq_len - past} new tokens after {past} in the cache: with model.mask.pattern="
                f"{self.config.mask.pattern} one follows at a time, as blocks start at position 0."
            )
        within = self.config.context_length
        return self.config.mask.build(seq_len, within=within, last_query_only=True)

    def compile_parts(self, compiled: Callable[[Any], Any]) -> None:
        """Replace what is computed, from the tokens to the loss, by what `compiled` makes of it.

        Block by block: of a model that is compiled whole, all gradients come at its end.
        """
        self._embed = compiled(self._embed)
        for block in self.blocks:
            block.forward = compiled(block.forward)
        self._loss = compiled(self._loss)

    def prepare_mask(self, seq_len: int) -> None:
        """Build the block mask for sequences of this length, which compiled code cannot do itself.

        The context length's is there from the start; others must be before compiled code sees one.
        """
        within = self.config.context_length
        self._masks[seq_len] = self.config.mask.build(seq_len, within=within)

    def head(self, hidden: Tensor) -> Tensor:
        """(..., C) hidden states to (..., V) logits, in the dtype of the multiplication."""
        # multiply by the whole padded table, which is why it is padded, then drop the padding
        return F.linear(hidden, self.tok_emb.weight)[..., : self.config.vocab_size]

    def n_params(self, *, positions: bool = True) -> int:
        """Parameters of the model; the tied head counts once and vocabulary padding not at all.

        Without learned positions this is the N of `model.flops`.
        """
        count = sum(parameter.numel() for parameter in self.parameters())
        count -= (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        if self.config.positions == "learned" and not positions:
            count -= self.pos_emb.weight.numel()
        return count

"""GPT-2 for long contexts: it has no mask buffers, and attention never stores T x T scores.

The architecture is that of Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners". Later inventions, from rotary positions to gated MLPs, are options.
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
from model.embedding import Embedding
from model.memory import check_memory
from model.residual import DeferredResidual, make_norm, normalise, resolve
from model.rope import rope_tables


class GPT(nn.Module):
    """A decoder-only language model.

    The token embedding is also the head, unless `config.tie_embeddings` is false.
    """

    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        check_memory(config, (config.token_rows + config.context_length) * config.n_embd)
        self.tok_emb = Embedding(config.padded_vocab_size, config.n_embd)
        if config.positions == "learned":
            self.pos_emb = Embedding(config.context_length, config.n_embd)
        else:
            self._make_rotary_tables()
        self.emb_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        if config.window_grows:
            windows = {T: config.at_context(T).window_size for T in config.contexts[:-1]}
            for layer, block in enumerate(self.blocks):
                assert isinstance(block, Block)
                if not config.attends_to_all(layer):
                    block.attn.training_windows = windows
        self.ln_f = make_norm(config)
        if not config.tie_embeddings:
            # a table like tok_emb, so that it is initialised, padded and decayed in the same way
            self.out_emb = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.context = ContextGroup()
        self._masks: dict[int, BlockSparseMask | None] = {}
        self._prepare_masks()
        self.init_weights()

    @classmethod
    def with_weights(cls, config: ModelConfig, weights: Mapping[str, Tensor]) -> Self:
        """Create a model from copies of these weights, without a random initialisation first."""
        with torch.device("meta"):
            model = cls(config)
        # Copies, because tensors may be memory-mapped: if the file shrinks, the process is killed.
        copies = {name: weight.clone() for name, weight in weights.items()}
        model.load_state_dict(copies, assign=True)
        if config.positions != "learned":
            model._make_rotary_tables()
        model._prepare_masks()
        return model

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all parameters as GPT-2 does, from torch's global generator.

        Layers are initialised by `init_linear_and_norm`, embeddings with a standard deviation of
        0.02. Padding rows of the embedding are 0 and stay 0, because they get no gradient.
        """
        init_linear_and_norm(self, self.config)
        tables = [self.tok_emb] if self.config.tie_embeddings else [self.tok_emb, self.out_emb]
        for table in tables:
            # Padding rows draw no random numbers, so vocab_multiple does not change the weights.
            nn.init.normal_(table.weight[: self.config.vocab_size], std=INIT_STD)
            nn.init.zeros_(table.weight[self.config.vocab_size :])
        if self.config.positions == "learned":
            nn.init.normal_(self.pos_emb.weight, std=INIT_STD)

    def set_context_group(self, context: ContextGroup) -> None:
        """Shard each sequence over the processes of `context`, from now on.

        Tokens, targets and doc_start are then this process's shard from `context.shard`; doc_start
        holds positions in the whole sequence. Results are those of this process's tokens. All
        processes of the group must call the model together.
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
        """Compute logits or, if targets are given, the cross-entropy loss.

        Args:
            tokens: (B, T) int64 ids below `config.vocab_size`. The data readers check the ids,
                because a check here would stall the GPU.
            targets: (B, S) int64, the next token of each of the last S <= T `tokens`; -100 is
                ignored.
            doc_start: as in `hidden`.
            reduction: "mean" over the targets that are not ignored, their "sum", or "none" for the
                loss of each target, which is 0 if ignored. "none" computes logits in float32, also
                under autocast.

        Returns:
            Without targets, logits (B, T, V). With targets, the loss in nats, in float32 (float64
            for a float64 model): a scalar, or (B, S) with reduction="none". The mean is NaN if all
            targets are ignored.

        Raises:
            ValueError: `tokens` is not (B, T), `targets` is not (B, S), `doc_start` has another
                shape, or learned positions get more than `config.context_length` tokens.
        """
        x, pending = self._stream(tokens, doc_start, None)
        if targets is None:
            return self.head(self._normalised(x, pending))
        fits = targets.dim() == 2 and targets.shape[0] == tokens.shape[0]
        if not fits or not 1 <= targets.shape[1] <= tokens.shape[1]:
            raise ValueError(
                f"targets have shape {tuple(targets.shape)} and tokens {tuple(tokens.shape)}: "
                "each of the last tokens needs one target (-100 to ignore it)."
            )
        return self._loss(x, pending, targets, reduction)

    def _loss(
        self,
        x: Tensor,
        pending: DeferredResidual | None,
        targets: Tensor,
        reduction: Literal["mean", "sum", "none"],
    ) -> Tensor:
        """Compute the loss that `forward` returns, from the last block's output."""
        hidden = self._normalised(x, pending)[:, -targets.shape[1] :]
        precision: AbstractContextManager = nullcontext()
        if reduction == "none":
            # Losses of single targets are for statistics, and bfloat16 logits would add noise.
            hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
            precision = torch.autocast(x.device.type, enabled=False)
        with precision:
            return linear_cross_entropy(
                hidden,
                self.head_weight,
                targets,
                reduction=reduction,
                vocab_size=self.config.vocab_size,
                softcap=self.config.logit_softcap,
            )

    def hidden(
        self, tokens: Tensor, *, doc_start: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Compute the last hidden states, which are the input of the head.

        Args:
            tokens: (B, T) int64 ids.
            doc_start: (B, T) int32, the position in its row at which each token's document begins.
                A token does not attend to anything before that, and learned positions count from
                there, as if each document were a sequence of its own. None: a row is one document.
            cache: keys and values of the tokens before `tokens`, to which those of `tokens` are
                appended. Positions continue from its length; learned ones still end at
                `config.context_length`.

        Returns:
            (B, T, C).

        Raises:
            ValueError: as in `forward` and `KVCache.append`; or a cache is combined with documents,
                with sharded sequences, or with several new tokens under a block mask.
        """
        return self._normalised(*self._stream(tokens, doc_start, cache))

    def _normalised(self, x: Tensor, pending: DeferredResidual | None) -> Tensor:
        return normalise(resolve(x, pending), self.ln_f)

    def _stream(
        self, tokens: Tensor, doc_start: Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, DeferredResidual | None]:
        """Return the residual stream after the last block, and the output still to be added."""
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
            raise ValueError(
                "doc_start and cache exclude each other: generate one document per row."
            )
        if self.context.size > 1 and cache is not None:
            raise ValueError(
                "a cache is not supported if sequences are sharded: generate in one process."
            )
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
        """Return the first block's input, and the rotary tables or None."""
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
            selected = positions if self.context.size > 1 else slice(past, seq_len)
            # Training follows the context, and everything else has the positions of the longest.
            stage = ""
            # A lookup makes compiled code valid for this length alone, so none without stages
            if self.training and self._stages and seq_len in self._stages:
                stage = f"_{index(seq_len)}"
            cos, sin = (getattr(self, f"rotary_{name}{stage}") for name in ("cos", "sin"))
            rotary = cos[selected], sin[selected]
        else:
            rotary = rope_tables(positions, self.config)
        device = x.device.type
        if torch.is_autocast_enabled(device) and not self.config.residual_in_fp32:
            # The residual stream. Autocast alone would keep it in float32.
            x = x.to(torch.get_autocast_dtype(device))
        return self.emb_dropout(x), rotary

    def _make_rotary_tables(self) -> None:
        """Compute the tables of the context, and of shorter ones in training that differ from it.

        Computed once: torch.compile would compute the angle again for every element of q and k.
        """
        config = self.config
        self._stages = set(config.contexts[:-1]) if config.rope_scaling != "none" else set()
        for length in (config.context_length, *self._stages):
            suffix = f"_{length}" if length in self._stages else ""
            at_length = config.at_context(length)
            tables = rope_tables(torch.arange(length), at_length)
            for name, table in zip(("rotary_cos", "rotary_sin"), tables, strict=True):
                self.register_buffer(f"{name}{suffix}", table, persistent=False)

    def _mask(self, past: int, seq_len: int) -> BlockSparseMask | None:
        """Return the block mask of queries [past, seq_len) and keys [0, seq_len)."""
        if self.config.mask.pattern == "dense":
            return None
        if past == 0:
            if not torch.compiler.is_compiling():
                self.prepare_mask(seq_len)
            return self._masks[index(seq_len)]  # an int, because torch.compile has a symbol here
        if seq_len - past > 1:
            raise ValueError(
                f"{seq_len - past} new tokens after {past} in the cache: with model.mask.pattern="
                f"{self.config.mask.pattern} pass one at a time, because blocks start at position "
                "0."
            )
        within = self.config.context_length
        return self.config.mask.build(seq_len, within=within, last_query_only=True)

    def compile_parts(self, compile_fn: Callable[[Any], Any]) -> None:
        """Compile the embedding, each block and the loss separately with `compile_fn`.

        If a model is compiled as a whole, all its gradients become available only at the end of
        the backward pass.
        """
        self._embed = compile_fn(self._embed)
        for block in self.blocks:
            block.forward = compile_fn(block.forward)
        self._loss = compile_fn(self._loss)

    def prepare_mask(self, seq_len: int) -> None:
        """Build the block mask for sequences of `seq_len` tokens, which compiled code cannot do.

        The masks for the contexts of training exist from the start. Call this for any other length
        before compiled code runs with it.
        """
        within = self.config.context_length
        self._masks[seq_len] = self.config.mask.build(seq_len, within=within)

    def _prepare_masks(self) -> None:
        for context_length in self.config.contexts:
            self.prepare_mask(context_length)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, (padded_vocab_size, C)."""
        return self.tok_emb.weight if self.config.tie_embeddings else self.out_emb.weight

    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits (..., V) from hidden states (..., C), in the dtype of the matmul."""
        # Multiply by the whole padded table, whose shape is faster, then drop the padding.
        logits = F.linear(hidden, self.head_weight)[..., : self.config.vocab_size]
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def n_params(self, *, lookup_tables: bool = True) -> int:
        """Count the parameters, a tied head once and vocabulary padding not at all.

        With lookup_tables=False, tables that no matmul reads are not counted: learned positions,
        and a token embedding that is not the head. This is the N of `model.flops`.
        """
        config = self.config
        count = sum(parameter.numel() for parameter in self.parameters())
        tables = config.token_rows // config.padded_vocab_size
        count -= tables * (config.padded_vocab_size - config.vocab_size) * config.n_embd
        if not lookup_tables and config.positions == "learned":
            count -= self.pos_emb.weight.numel()
        if not lookup_tables and not config.tie_embeddings:
            count -= config.vocab_size * config.n_embd
        return count

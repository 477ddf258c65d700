"""Classifier of texts and images: bidirectional blocks, pooling and a small head.

This is the encoder of Long Range Arena (Tay et al. 2021, arXiv 2011.04006), built from the GPT's
blocks. Shapes: B rows, T tokens, C n_embd, N positions.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.block import INIT_STD, Block, init_linear_and_norm
from model.classifier_config import ClassifierConfig
from model.memory import check_memory
from model.neighbours import init_local_attention, neighbour_offsets
from model.positions import (
    axial_rotary_tables,
    gather_rows,
    rotary_tables,
    row_and_column_waves,
    sinusoids,
)
from model.residual import make_norm, normalise, resolve

N_WAVES = 8
"""Waves per coordinate with embedding="row_column". The fastest has a period of 4 pixels in 256."""


class TokenEmbedding(nn.Module):
    """Embedding table that is read by a matmul with one-hot ids.

    With few ids, each one occurs many times in a batch. The gradient of an indexed lookup would add
    all of these to the same rows one by one, in an order that varies.
    """

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids (...) as (..., C), in the autocast dtype if there is one."""
        dtype = self.weight.dtype
        if torch.is_autocast_enabled(ids.device.type):
            dtype = torch.get_autocast_dtype(ids.device.type)
        one_hot = ids[..., None] == torch.arange(len(self.weight), device=ids.device)
        return one_hot.to(dtype) @ self.weight

    @torch.no_grad()
    def init_weights(self, *, ordered: bool) -> None:
        """Draw independent normal rows. With `ordered`, rows of near ids start close together.

        Without it, the embeddings of pixels must learn from scratch that 254 is nearly 255.
        """
        nn.init.normal_(self.weight, std=INIT_STD)
        if ordered:
            vocab_size, width = self.weight.shape
            direction = torch.randn(width)
            fraction = torch.linspace(0, 1, vocab_size)[:, None]
            self.weight += fraction * direction


class Classifier(nn.Module):
    """Classifier of sequences, or of pairs of sequences."""

    rotary_cos: Tensor
    rotary_sin: Tensor
    position_features: Tensor

    def __init__(self, config: ClassifierConfig, *, causal: bool = False) -> None:
        """Build the model and draw its weights.

        With `causal`, a token does not attend to later ones. Next-token prediction needs that
        (`model.token_predictor`).
        """
        super().__init__()
        self.config = config
        C = config.n_embd
        check_memory(config, C * (config.vocab_size + config.n_positions))
        self.tok_emb = TokenEmbedding(config.vocab_size, C)
        self._init_positions()
        if config.pooling == "cls":
            self.cls = nn.Parameter(torch.empty(C))
        self.emb_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, layer, causal=causal) for layer in range(config.n_layer)
        )
        self.ln_f = make_norm(config)
        pooled = C * (2 if config.pooling == "mean_max" else 1)
        # The head of a pair reads both vectors, their product and their difference.
        pooled *= 4 if config.documents == 2 else 1
        self.head_in = nn.Linear(pooled, config.n_inner)
        self.head_out = nn.Linear(config.n_inner, config.n_classes)
        # Built here, because compiled code cannot build it.
        self.mask = config.mask.build(config.seq_len)
        self.init_weights()

    def _init_positions(self) -> None:
        """Create position parameters and constants: those added to tokens, and rotary tables."""
        config = self.config
        rows = columns = positions = torch.arange(config.n_positions)
        if config.grid_width is not None:
            rows, columns = positions // config.grid_width, positions % config.grid_width
        if config.embedding == "learned":
            self.pos_emb = nn.Parameter(torch.empty(config.n_positions, config.n_embd))
        elif config.embedding == "sinusoidal":
            self._constant("position_features", sinusoids(positions, config.n_embd))
        elif config.embedding == "row_column":
            assert config.grid_width is not None
            waves = row_and_column_waves(rows, columns, config.grid_width, N_WAVES)
            self._constant("position_features", waves)
            self.pos_proj = nn.Linear(waves.shape[-1], config.n_embd)
        if config.rotary != "none":
            cos, sin = self._rotary_at(rows, columns if config.rotary == "axial" else positions)
            self._constant("rotary_cos", cos)
            self._constant("rotary_sin", sin)

    def _rotary_at(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Build tables for `rotary_qkv`; in a sequence, columns are positions, rows unused."""
        config = self.config
        if config.rotary == "sequence":
            return rotary_tables(columns, config.head_dim, base=10_000.0)
        return axial_rotary_tables(
            rows, columns, config.head_dim, config.min_wavelength, config.max_wavelength
        )

    def _constant(self, name: str, table: Tensor) -> None:
        self.register_buffer(name, table, persistent=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all parameters from torch's global generator."""
        config = self.config
        init_linear_and_norm(self, config)
        # The head does not add to a residual stream, so its weights need not be small.
        for layer in (self.head_in, self.head_out):
            nn.init.xavier_uniform_(layer.weight)
        self.tok_emb.init_weights(ordered=config.tokens == "intensities")
        if config.embedding == "learned":
            nn.init.normal_(self.pos_emb, std=INIT_STD)
        if config.pooling == "cls":
            nn.init.normal_(self.cls, std=INIT_STD)
        if config.local_start:
            for layer, block in enumerate(self.blocks):
                assert isinstance(block, Block)
                is_grid = config.rotary == "axial"
                rows, columns = neighbour_offsets(config.n_head, layer, grid=is_grid)
                cos, sin = self._rotary_at(-rows, -columns)
                init_local_attention(block.attn, cos, sin, config.local_start)

    def forward(
        self, tokens: Tensor, lengths: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Compute the logits of each example.

        Args:
            tokens: (B, T) integers below `config.vocab_size`. T is `config.context_length`. With a
                dense mask, texts may be shorter, and T may be any number if `positions` are given.
                The documents of an example are consecutive rows.
            lengths: (B,) int32, at least 1: the number of tokens in each row before its padding.
                None: no padding.
            positions: (B, T), or (T,) for all rows, integers below `config.n_positions`: the index
                of each token in the whole sequence or image. None: 0 to T - 1. Packed images, which
                leave out zero pixels, need them. Except for padding, no two tokens of a row may
                have the same position.

        Returns:
            (B / documents, n_classes).

        Raises:
            ValueError: `tokens` is not (B, T), or B is not a multiple of `config.documents`.
        """
        documents = self.config.documents
        if tokens.shape[0] % documents:
            raise ValueError(
                f"a batch of {tokens.shape[0]} sequences must be a multiple of model.documents="
                f"{documents}."
            )
        states = self.encode(self.tok_emb(tokens), lengths, positions)
        pooled = self._pool(states, lengths)
        if documents == 2:
            first, second = pooled[0::2], pooled[1::2]
            pooled = torch.cat((first, second, first * second, first - second), dim=-1)
        return self.head_out(F.relu(self.head_in(pooled)))

    def encode(self, x: Tensor, lengths: Tensor | None, positions: Tensor | None) -> Tensor:
        """Compute the states that `forward` pools, from embedded tokens (B, T, C).

        `lengths` and `positions` are those of `forward`.

        Returns:
            (B, T, C); with a cls token, which comes first, (B, 1 + T, C).

        Raises:
            ValueError: `forward` does not allow this T.
        """
        if x.dim() != 3 or not self._supports_length(
            x.shape[1], has_positions=positions is not None
        ):
            raise ValueError(
                f"tokens have shape {tuple(x.shape[:-1])} and must be (batch, "
                f"model.context_length={self.config.context_length}). Only texts with a dense mask "
                "may be shorter."
            )
        x, rotary = self._with_positions(x, positions)
        if self.config.pooling == "cls":
            x, rotary, lengths = self._with_cls(x, rotary, lengths)
        pending = None
        for block in self.blocks:
            x, pending = block(x, pending, rotary, mask=self.mask, kv_lengths=lengths)
        return normalise(resolve(x, pending), self.ln_f)

    def _supports_length(self, n_tokens: int, *, has_positions: bool) -> bool:
        """Return whether rows may have `n_tokens` tokens, with or without explicit `positions`."""
        context_length = self.config.context_length
        if n_tokens == context_length or self.mask is not None:
            return n_tokens == context_length
        return has_positions or (self.config.grid_width is None and 0 < n_tokens < context_length)

    def _with_positions(
        self, x: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the first block's input, and the rotary tables or None."""
        config = self.config

        def lookup(table: Tensor) -> Tensor:
            return table[: x.shape[1]] if positions is None else table[positions]

        if config.embedding == "learned":
            table = self.pos_emb
            x = x + (lookup(table) if positions is None else gather_rows(table, positions))
        elif config.embedding == "sinusoidal":
            x = x + lookup(self.position_features)
        elif config.embedding == "row_column":
            x = x + self.pos_proj(lookup(self.position_features))
        rotary = None
        if config.rotary != "none":
            rotary = lookup(self.rotary_cos), lookup(self.rotary_sin)
        return self.emb_dropout(x), rotary

    def _with_cls(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, lengths: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None]:
        """Prepend a cls token, without a position, to the states, rotary tables and lengths."""
        B, _, C = x.shape
        x = torch.cat((self.cls.to(x.dtype).expand(B, 1, C), x), dim=1)
        if rotary is not None:
            cos, sin = rotary
            cos = torch.cat((torch.ones_like(cos[..., :1, :]), cos), dim=-2)
            sin = torch.cat((torch.zeros_like(sin[..., :1, :]), sin), dim=-2)
            rotary = cos, sin
        return x, rotary, None if lengths is None else lengths + 1

    def _pool(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Pool states (B, T, C) over tokens, without padding: (B, C), or (B, 2 C) by mean_max."""
        pooling = self.config.pooling
        if pooling == "cls":
            return x[:, 0]
        pooled = []
        padding = None
        if lengths is not None:
            padding = (torch.arange(x.shape[1], device=x.device) >= lengths[:, None])[..., None]
        if pooling != "max":
            if padding is None or lengths is None:
                pooled.append(x.mean(1))
            else:
                pooled.append(x.masked_fill(padding, 0.0).sum(1) / lengths[:, None])
        if pooling != "mean":
            masked = x if padding is None else x.masked_fill(padding, -math.inf)
            # Not amax: its backward pass compares the maximum with values that torch.compile
            # recomputes with different rounding. Where none is equal, the gradient is NaN.
            pooled.append(masked.max(1).values)
        return torch.cat(pooled, dim=-1)

    def n_params(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

"""A classifier of texts and images: bidirectional blocks, pooled, and a small head.

The encoder of Long Range Arena (Tay et al. 2021, arXiv 2011.04006), on the GPT's own block.
Shapes: B rows, T tokens, C n_embd, N places a token can have.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.block import INIT_STD, Block, init_linear_and_norm
from model.classifier_config import ClassifierConfig
from model.memory import check_memory
from model.neighbours import begin_local, neighbours
from model.positions import (
    axial_rotary_tables,
    rotary_tables,
    row_and_column_waves,
    rows_at,
    sinusoids,
)
from model.residual import add, make_norm, normalise

N_WAVES = 8
"""Of each coordinate under embedding="row_column": the fastest turns once in 4 pixels of 256."""


class TokenEmbedding(nn.Module):
    """A table of vectors, looked up by a matrix product.

    With few ids, each stands in many places of a batch: the gradient of a look-up would add them up
    one by one in the same rows, in an order that varies.
    """

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def forward(self, ids: Tensor) -> Tensor:
        """(..., ) ids to (..., C), in the dtype of matrix products."""
        dtype = self.weight.dtype
        if torch.is_autocast_enabled(ids.device.type):
            dtype = torch.get_autocast_dtype(ids.device.type)
        one_hot = ids[..., None] == torch.arange(len(self.weight), device=ids.device)
        return one_hot.to(dtype) @ self.weight

    @torch.no_grad()
    def init_weights(self, *, ordered: bool) -> None:
        """Independent normal rows, or, if `ordered`, near rows close together.

        Pixel embeddings that start unrelated must learn from scratch that 254 is nearly 255.
        """
        nn.init.normal_(self.weight, std=INIT_STD)
        if ordered:
            vocab_size, width = self.weight.shape
            direction = torch.randn(width)
            share = torch.linspace(0, 1, vocab_size)[:, None]
            self.weight += share * direction


class Classifier(nn.Module):
    """Labels of sequences, or of pairs of them."""

    rotary_cos: Tensor
    rotary_sin: Tensor
    place_features: Tensor

    def __init__(self, config: ClassifierConfig, *, causal: bool = False) -> None:
        """Draw the weights; `causal` hides what comes after a token, as where the next one is to be
        predicted (`model.token_predictor`).
        """
        super().__init__()
        self.config = config
        C = config.n_embd
        check_memory(config, config.vocab_size + config.n_positions)
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
        # of a pair: both, their product and their difference
        pooled *= 4 if config.documents == 2 else 1
        self.head_in = nn.Linear(pooled, config.n_inner)
        self.head_out = nn.Linear(config.n_inner, config.n_classes)
        # Made once: compiled code cannot build it.
        self.mask = config.mask.build(config.seq_len)
        self.init_weights()

    def _init_positions(self) -> None:
        """Parameters and tables of constants: what is added to tokens, what turns q and k."""
        config = self.config
        rows = columns = places = torch.arange(config.n_positions)
        if config.grid_width is not None:
            rows, columns = places // config.grid_width, places % config.grid_width
        if config.embedding == "learned":
            self.pos_emb = nn.Parameter(torch.empty(config.n_positions, config.n_embd))
        elif config.embedding == "sinusoidal":
            self._constant("place_features", sinusoids(places, config.n_embd))
        elif config.embedding == "row_column":
            assert config.grid_width is not None
            waves = row_and_column_waves(rows, columns, config.grid_width, N_WAVES)
            self._constant("place_features", waves)
            self.pos_proj = nn.Linear(waves.shape[-1], config.n_embd)
        if config.rotary != "none":
            cos, sin = self._rotary_at(rows, columns if config.rotary == "axial" else places)
            self._constant("rotary_cos", cos)
            self._constant("rotary_sin", sin)

    def _rotary_at(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Tables for `apply_rotary`. In a sequence, columns are places and rows nothing."""
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
        """Draw every parameter, from torch's global generator."""
        config = self.config
        init_linear_and_norm(self, config.n_layer)
        for layer in (self.head_in, self.head_out):  # no residual stream to keep small
            nn.init.xavier_uniform_(layer.weight)
        self.tok_emb.init_weights(ordered=config.tokens == "intensities")
        if config.embedding == "learned":
            nn.init.normal_(self.pos_emb, std=INIT_STD)
        if config.pooling == "cls":
            nn.init.normal_(self.cls, std=INIT_STD)
        if config.local_start:
            for layer, block in enumerate(self.blocks):
                assert isinstance(block, Block)
                rows, columns = neighbours(config.n_head, layer, grid=config.rotary == "axial")
                begin_local(block.attn, *self._rotary_at(-rows, -columns), config.local_start)

    def forward(
        self, tokens: Tensor, lengths: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        """Logits of each example.

        Args:
            tokens: (B, T) integers below `config.vocab_size`. T is `config.context_length`; where
                the mask is dense, a sequence may be shorter, and T any where `places` are given.
                The documents of an example follow one another.
            lengths: (B,) int32, at least 1: tokens that are not padding, which comes after them.
                None: all.
            places: (B, T), or (T,) for all rows, integers below `config.n_positions`: where each
                token stands in the whole sequence or image; None: in order. Packed images, whose
                zero pixels are left out, need them. No two tokens of a row stand at the same place,
                but for padding.

        Returns:
            (B / documents, n_classes).

        Raises:
            ValueError: `tokens` are not (B, T), or B no multiple of `config.documents`.
        """
        documents = self.config.documents
        if tokens.shape[0] % documents:
            raise ValueError(
                f"{tokens.shape[0]} sequences cannot be examples of model.documents="
                f"{documents} each."
            )
        states = self.encode(self.tok_emb(tokens), lengths, places)
        pooled = self._pool(states, lengths)
        if documents == 2:
            one, other = pooled[0::2], pooled[1::2]
            pooled = torch.cat((one, other, one * other, one - other), dim=-1)
        return self.head_out(F.relu(self.head_in(pooled)))

    def encode(self, x: Tensor, lengths: Tensor | None, places: Tensor | None) -> Tensor:
        """The states that are pooled, (B, T, C), from what `tok_emb` makes of tokens, (B, T, C).

        With a cls, which comes first, (B, 1 + T, C). `lengths` and `places` as in `forward`.

        Raises:
            ValueError: T is not as `forward` says.
        """
        if x.dim() != 3 or not self._takes(x.shape[1], placed=places is not None):
            raise ValueError(
                f"tokens have shape {tuple(x.shape[:-1])} and must be (batch, "
                f"model.context_length={self.config.context_length}), or fewer of a text where the "
                "mask is dense."
            )
        x, rotary = self._with_positions(x, places)
        if self.config.pooling == "cls":
            x, rotary, lengths = self._with_cls(x, rotary, lengths)
        pending = None
        for block in self.blocks:
            x, pending = block(x, pending, rotary, mask=self.mask, kv_lengths=lengths)
        return normalise(add(x, pending), self.ln_f)

    def _takes(self, n_tokens: int, *, placed: bool) -> bool:
        """Whether rows may have so many tokens, with places of their own or in order."""
        most = self.config.context_length
        if n_tokens == most or self.mask is not None:
            return n_tokens == most
        return placed or (self.config.grid_width is None and 0 < n_tokens < most)

    def _with_positions(
        self, x: Tensor, places: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The first block's input, and the tables of rotary positions if there are such."""
        config = self.config

        def at(table: Tensor) -> Tensor:
            return table[: x.shape[1]] if places is None else table[places]

        if config.embedding == "learned":
            x = x + (at(self.pos_emb) if places is None else rows_at(self.pos_emb, places))
        elif config.embedding == "sinusoidal":
            x = x + at(self.place_features)
        elif config.embedding == "row_column":
            x = x + self.pos_proj(at(self.place_features))
        rotary = None
        if config.rotary != "none":
            rotary = at(self.rotary_cos), at(self.rotary_sin)
        return self.emb_dropout(x), rotary

    def _with_cls(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, lengths: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None]:
        """States, tables and lengths with a cls before each row, which has no position."""
        B, _, C = x.shape
        x = torch.cat((self.cls.to(x.dtype).expand(B, 1, C), x), dim=1)
        if rotary is not None:
            cos, sin = rotary
            cos = torch.cat((torch.ones_like(cos[..., :1, :]), cos), dim=-2)
            sin = torch.cat((torch.zeros_like(sin[..., :1, :]), sin), dim=-2)
            rotary = cos, sin
        return x, rotary, None if lengths is None else lengths + 1

    def _pool(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """(B, T, C) states to (B, C), or (B, 2 C) by mean and max, over what is not padding."""
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
            shown = x if padding is None else x.masked_fill(padding, -math.inf)
            # not amax: its gradient looks for the maximum among values that torch.compile computes
            # again with another rounding, and is NaN where it finds none
            pooled.append(shown.max(1).values)
        return torch.cat(pooled, dim=-1)

    def n_params(self) -> int:
        """Parameters of the model."""
        return sum(parameter.numel() for parameter in self.parameters())

"""Table of embeddings."""

from torch import Tensor, nn

from kernels.fused.embedding import embedding


class Embedding(nn.Embedding):
    """Table of embeddings with the gradient of `kernels.fused.embedding`.

    The options of `nn.Embedding` other than its sizes have no effect.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Rows (..., C) of indices (...)."""
        return embedding(input, self.weight)

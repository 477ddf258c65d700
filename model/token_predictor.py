"""Token prediction with a classifier's encoder, to pretrain it on the task's own examples.

This is the self-pretraining of Amos, Berant and Gupta, "Never Train From Scratch" (ICLR 2024, arXiv
2310.02980). Shapes: B rows, T tokens, C n_embd, V vocab_size.
"""

import torch
from torch import Tensor, nn

from model.block import INIT_STD
from model.classifier import Classifier
from model.classifier_config import ClassifierConfig


class TokenPredictor(nn.Module):
    """Predictor of the token at each position, or of the next one.

    Attributes:
        classifier: the classifier whose encoder is trained. Its head is initialised, not trained.
        mask_token: (C,), replaces hidden tokens. None if attention is causal.
        tokens_out: linear layer from states to logits.
    """

    def __init__(self, config: ClassifierConfig, *, causal: bool) -> None:
        """Build the model and draw its weights.

        The classifier's weights are drawn first, so a seed gives the same ones as for a classifier
        alone. With `causal` attention tokens are not hidden, so there is no `mask_token`.
        """
        super().__init__()
        self.classifier = Classifier(config, causal=causal)
        # The head gets no gradient here, and DistributedDataParallel would wait for it forever.
        self.classifier.head_in.requires_grad_(False)
        self.classifier.head_out.requires_grad_(False)
        self.mask_token = None if causal else nn.Parameter(INIT_STD * torch.randn(config.n_embd))
        self.tokens_out = nn.Linear(config.n_embd, config.vocab_size)
        nn.init.normal_(self.tokens_out.weight, std=INIT_STD)
        nn.init.zeros_(self.tokens_out.bias)

    def forward(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        positions: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits of tokens.

        Args:
            tokens, lengths, positions: those of `Classifier.forward`.
            hidden: (B, T) bool, tokens whose embedding is replaced by `mask_token`; None: none. Not
                supported with causal attention.

        Returns:
            (B, T, V), also for padding.

        Raises:
            ValueError: `tokens` is not (B, T), or `hidden` is given with causal attention.
        """
        x = self.classifier.tok_emb(tokens)
        if hidden is not None:
            if self.mask_token is None:
                raise ValueError(
                    "hidden must be None for a TokenPredictor with causal=True, which has no "
                    "mask_token to replace tokens with. Create it with causal=False."
                )
            x = torch.where(hidden[..., None], self.mask_token.to(x.dtype), x)
        states = self.classifier.encode(x, lengths, positions)
        return self.tokens_out(states[:, -tokens.shape[-1] :])  # without the cls token

    def n_params(self) -> int:
        """Return the number of trained parameters."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

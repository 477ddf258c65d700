"""A classifier's encoder that predicts tokens, to be trained on examples before their labels are.

Self-pretraining as in Amos, Berant and Gupta, "Never Train From Scratch" (ICLR 2024, arXiv
2310.02980). Shapes: B rows, T tokens, C n_embd, V vocab_size.
"""

import torch
from torch import Tensor, nn

from model.block import INIT_STD
from model.classifier import Classifier
from model.classifier_config import ClassifierConfig


class TokenPredictor(nn.Module):
    """Logits of the token at each place, or of the one after it.

    Attributes:
        classifier: whose encoder is trained; its head is drawn and left as it is.
        mask_token: (C,), stands for tokens that are hidden. Only where attention is not causal.
        tokens_out: states to logits.
    """

    def __init__(self, config: ClassifierConfig, *, causal: bool) -> None:
        """Draw the weights, the classifier's first: with a seed, they are those of it alone.

        Where attention is `causal`, no token is hidden from itself: there is no `mask_token`.
        """
        super().__init__()
        self.classifier = Classifier(config, causal=causal)
        # without a gradient, which DistributedDataParallel would wait for in vain
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
        places: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Logits of tokens.

        Args:
            tokens: (B, T) integers, as a Classifier takes them.
            lengths, places: as a Classifier takes them.
            hidden: (B, T) bool, the tokens in whose stead the model sees `mask_token`, at their
                places; None: none. Not for causal attention.

        Returns:
            (B, T, V), of what stands beyond a row's length too.

        Raises:
            ValueError: `tokens` are not (B, T), or some are hidden where attention is causal.
        """
        x = self.classifier.tok_emb(tokens)
        if hidden is not None:
            if self.mask_token is None:
                raise ValueError(
                    "hidden must be None for a TokenPredictor with causal=True, which has no "
                    "mask_token to put in their stead: make it with causal=False."
                )
            x = torch.where(hidden[..., None], self.mask_token.to(x.dtype), x)
        states = self.classifier.encode(x, lengths, places)
        return self.tokens_out(states[:, -tokens.shape[-1] :])  # not of a cls

    def n_params(self) -> int:
        """Parameters that are trained."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

"""A small GPT."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flockstep.fields import require, require_integer, require_number


class GPT(nn.Module):
    """A transformer decoder that predicts the next token: (batch, length) tokens to (batch, length,
    vocabulary) logits.

    804,096 parameters as it comes, 795,904 (0.80 M) without the position embeddings.

    Papers: Radford et al., "Language models are unsupervised multitask learners" (GPT-2), 2019:
    normalisation before each part, weights from N(0, 0.02²), those that write into the residual
    stream divided by √(2·layers); Press & Wolf, 2017: the embedding is the output layer too. Sizes,
    and no biases anywhere, as nanoGPT (Karpathy, 2022) trains on the characters of tiny Shakespeare
    on a CPU.

    Fields:
        vocabulary: the number of different tokens.
        context: the longest sequence it takes.
        layers, heads, width: blocks, attention heads of each, and features of each token; heads
            divide the width.
        dropout: after the embedding, in the attention and after each part of a block; 0 for none.
    """

    def __init__(
        self,
        vocabulary: int = 65,
        context: int = 64,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {
            "vocabulary": vocabulary,
            "context": context,
            "layers": layers,
            "heads": heads,
            "width": width,
        }
        for field, value in sizes.items():
            require_integer(field, value, 1)
        require(width % heads == 0, "width", f"be a multiple of the {heads} heads", width)
        require_number("dropout", dropout, at_least=0, at_most=1)
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(heads, width, dropout) for _ in range(layers)))
        self.normalise = nn.LayerNorm(width, bias=False)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() > 1:  # all but the gains of the normalisations, which start at 1
                shrink = math.sqrt(2 * layers) if name.endswith("outward.weight") else 1
                nn.init.normal_(weight, std=0.02 / shrink)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[-1]
        require(
            length <= self.context,
            "tokens",
            f"be at most {self.context} long, the model's context",
            length,
        )
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        x = self.normalise(self.blocks(self.dropout(x)))
        return F.linear(x, self.tokens.weight)


class Block(nn.Module):
    """Attention, then two linear layers with GELU; each is normalised before and added to what
    came in.
    """

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width, bias=False)
        self.attention = CausalAttention(heads, width, dropout)
        self.before_features = nn.LayerNorm(width, bias=False)
        self.inward = nn.Linear(width, 4 * width, bias=False)
        self.outward = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before_attention(x)))
        features = F.gelu(self.inward(self.before_features(x)))
        out: Tensor = x + self.dropout(self.outward(features))
        return out


class CausalAttention(nn.Module):
    """Each token attends to itself and to those before it (Vaswani et al., 2017)."""

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.inward = nn.Linear(width, 3 * width, bias=False)  # queries, keys and values
        self.outward = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inward(x).unflatten(-1, (3, self.heads, -1))
        # Each (batch, heads, length, width ÷ heads).
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.outward(mixed.transpose(1, 2).flatten(2))
        return out

"""The two models of the demo, written as anybody would write them for Lightning.

Nothing here knows about precision: no autocast, no cast, no scaler. The same modules run with and without autoprec.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WARMUP_STEPS = 20


class Block(nn.Module):
    """A pre-norm transformer block with causal attention.

    Args:
        width: Size of the residual stream.
        heads: Attention heads; must divide ``width``.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the residual stream after attention and the two-layer perceptron, ``[batch, time, width]``."""
        x = x + self.project(self._attend(self.norm_attention(x)))
        hidden: Tensor = self.contract(F.gelu(self.expand(self.norm_mlp(x))))
        return x + hidden

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)


class ByteGPT(pl.LightningModule):
    """A language model over bytes: next-byte cross entropy in nats.

    Args:
        width: Size of the residual stream.
        layers: Number of blocks.
        heads: Attention heads of a block.
        context: Longest sequence, in bytes.
        learning_rate: AdamW's learning rate after the warm-up.
    """

    def __init__(
        self, width: int = 384, layers: int = 6, heads: int = 6, context: int = 256, learning_rate: float = 1e-3
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.apply(_init_gpt_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps bytes ``[batch, time]`` to logits ``[batch, time, 256]``."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, batch: Any) -> Tensor:
        """Mean cross entropy of the next byte; ``batch`` is ``[batch, time + 1]`` int64."""
        (window,) = batch
        logits = self(window[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the loss of one batch."""
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        """AdamW in its default implementation, with a linear warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        return _with_warmup(optimizer)


class DigitsCNN(pl.LightningModule):
    """A classifier of 8 x 8 grey images: three convolutions with BatchNorm and a linear head.

    Args:
        width: Channels of the first convolution; the others have 2 and 4 times as many.
        learning_rate: AdamW's learning rate after the warm-up.
    """

    def __init__(self, width: int = 32, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.features = nn.Sequential(
            *_convolution(1, width),
            *_convolution(width, 2 * width),
            nn.MaxPool2d(2),
            *_convolution(2 * width, 4 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images ``[batch, 1, 8, 8]`` to logits ``[batch, 10]``."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def loss(self, batch: Any) -> Tensor:
        """Mean cross entropy; ``batch`` is a pair of images and labels."""
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the loss of one batch."""
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        """AdamW in its default implementation, with a linear warm-up."""
        return _with_warmup(torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01))


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def _init_gpt_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _with_warmup(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

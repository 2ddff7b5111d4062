"""Ten recipes that are known to diverge or to stall in a static 16-bit precision.

All train on real data: scikit-learn's digits, or lines of the standard library's source. What makes each of them hard
is something that people do write: grey levels that are not normalised, a mask of -1e9, a learning rate far too high.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from autoprec.demo import data
from benchmarks.divergence_models import (
    ConvNet,
    MaskedAttention,
    MatchingGAN,
    Perceptron,
    Prototypes,
    Recurrent,
    SquaredReLU,
    Study,
)

BATCH_SIZE = 16
Material = tuple[TensorDataset, tuple[Tensor, ...]]


class Arm(NamedTuple):
    """A way of training a recipe.

    Attributes:
        precision: That of the Trainer.
        is_steered: Whether the callback is added.
        is_clean: Whether the data are those without what is wrong with them.
        clip: The Trainer's ``gradient_clip_val``; ``None`` for the recipe's.
    """

    precision: str
    is_steered: bool = False
    is_clean: bool = False
    clip: float | None = None

    def __str__(self) -> str:
        """The arm in words."""
        parts = [self.precision, *(["callback"] if self.is_steered else [])]
        if self.clip is not None:
            parts.append(f"clips at {self.clip:g}")
        return " + ".join([*parts, *(["clean data"] if self.is_clean else [])])


@dataclass(frozen=True)
class Recipe:
    """One way to ruin a run in 16 bits.

    Args:
        name: Name in the output.
        static: Precision that is known to fail here.
        fails: Why.
        module: Makes the module; the seed of its first weights is set before.
        material: Makes the training samples, in order, and one held-out batch, from their number and a seed.
        steps: Optimizer steps.
        factor: Largest final loss of a survivor, in units of the reference's with the same seed.
        clean: The material without what is wrong with it, for a recipe that fp32 does not survive either: then the
            reference is fp32 on these. ``None``: the reference is fp32 on the same data.
        autoprec: Precision of the Trainer that the callback is added to; ``None`` for ``static``.
        options: Arguments of every Trainer of the recipe.
        also: Further arms, for comparison.
    """

    name: str
    static: str
    fails: str
    module: Callable[[], Study]
    material: Callable[[int, int], Material]
    steps: int
    factor: float = 1.5
    clean: Callable[[int, int], Material] | None = None
    autoprec: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    also: Sequence[Arm] = (Arm("bf16-mixed"),)

    def arms(self) -> dict[str, Arm]:
        """Every way of training by name: ``reference``, ``static``, ``autoprec``, and those for comparison in words."""
        return {
            "reference": Arm("32-true", is_clean=self.clean is not None),
            "static": Arm(self.static),
            "autoprec": Arm(self.autoprec or self.static, is_steered=True),
            **{str(arm): arm for arm in self.also},
        }

    def identity(self) -> list[Any]:
        """What its results depend on besides source and versions, for JSON."""
        return [self.name, self.steps, BATCH_SIZE, dict(self.options)]


@functools.cache
def _digits() -> data.Split:
    return data.load_digits()


def _images(
    samples: int, seed: int, gain: float = 1.0, is_bright: Callable[[int], bool] | None = None, by: float = 1.0
) -> Material:
    """Digits in [0, gain], in an order drawn from the seed; those of bright batches are ``by`` times as bright."""
    images, labels = _digits().train
    order = data.shuffled_passes(len(images), samples, seed)
    batches = [index // BATCH_SIZE for index in range(samples)]
    factors = [gain * by if is_bright is not None and is_bright(batch) else gain for batch in batches]
    held_out = (_digits().held_out[0] * gain, _digits().held_out[1])
    return TensorDataset(images[order] * torch.tensor(factors).view(-1, 1, 1, 1), labels[order]), held_out


def _images_and_noise(samples: int, seed: int, grey: float, noise: int) -> Material:
    images, held_out = _digits().train[0] * grey, _digits().held_out[0] * grey
    generator = torch.Generator().manual_seed(seed)
    z, of_held_out = (torch.randn(count, noise, generator=generator) for count in (samples, len(held_out)))
    return TensorDataset(images[data.shuffled_passes(len(images), samples, seed)], z), (held_out, of_held_out)


@functools.cache
def _lines(context: int) -> tuple[Tensor, Tensor]:
    """Lines of source, cut to ``context + 1`` bytes and padded on the left; training and held-out part."""
    split = data.load_source(limit=400_000)
    return _padded(split.train[0], context + 1), _padded(split.held_out[0], context + 1)


def _padded(text: Tensor, length: int) -> Tensor:
    lines = [line[:length] for line in bytes(text.tolist()).split(b"\n") if len(line) >= 4 and line.isascii()]
    rows = torch.full((len(lines), length), MaskedAttention.PADDING)
    for row, line in zip(rows, lines, strict=True):
        row[length - len(line) :] = torch.tensor(list(line))
    return rows


def _padded_lines(samples: int, seed: int, context: int) -> Material:
    train, held_out = _lines(context)
    return TensorDataset(train[data.shuffled_passes(len(train), samples, seed)]), (held_out[:256],)


def _cosine(step: int, steps: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps)))


def _tail(step: int) -> float:
    return 1.0 if step < 100 else 0.05


def _is_batch_40(batch: int) -> bool:
    return batch == 40


def _is_every_eighth(batch: int) -> bool:
    return batch % 8 == 3


def _prototypes() -> Prototypes:
    images = _digits().train[0].flatten(1) * 255.0
    picked = torch.randperm(len(images))[:10]  # of any class
    return Prototypes(images[picked], make_optimizer=partial(Adam, lr=1.0))


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "high-lr",
            "16-mixed",
            "A learning rate far too high drives weights up in front of a LayerNorm, which does not mind, until"
            " activations leave the range of fp16; from there no step is applied that could bring them back.",
            partial(
                Perceptron,
                activation=SquaredReLU,
                is_normed=True,
                make_optimizer=partial(Adam, lr=0.1),
                schedule=partial(_cosine, steps=400),
            ),
            _images,
            400,
            factor=2.0,
        ),
        Recipe(
            "large-logits",
            "16-mixed",
            "Logits are products of images in grey levels, up to four million; fp16 ends at 65504.",
            _prototypes,
            partial(_images, gain=255.0),
            300,
        ),
        Recipe(
            "bf16-tail",
            "bf16-true",
            "In a long tail at a low learning rate most updates are below half a unit in the last place of a bf16"
            " weight and round to nothing.",
            partial(Perceptron, make_optimizer=partial(SGD, lr=0.1), schedule=_tail),
            _images,
            2000,
            autoprec="bf16-mixed",
            also=(Arm("bf16-mixed"), Arm("bf16-true", is_steered=True)),
        ),
        Recipe(
            "batchnorm",
            "16-mixed",
            "One batch a million times too bright overflows the first convolution. The step is skipped, but BatchNorm"
            " has seen the infinity, and its running statistics keep it.",
            partial(ConvNet, make_optimizer=partial(Adam, lr=0.01)),
            partial(_images, is_bright=_is_batch_40, by=1e6),
            400,
            factor=2.0,
        ),
        Recipe(
            "scale-collapse",
            "16-mixed",
            "Every eighth batch is a million times too bright and overflows. Each time the loss scale is halved, and"
            " long before it may grow again the gradients of all others underflow.",
            partial(Perceptron, make_optimizer=partial(Adam, lr=0.002)),
            partial(_images, is_bright=_is_every_eighth, by=1e6),
            600,
            options={"gradient_clip_val": 1.0},
        ),
        Recipe(
            "mask-constant",
            "16-mixed",
            "A mask of -1e9 is minus infinity in fp16, and the softmax of a row that is masked as a whole is NaN.",
            partial(MaskedAttention, make_optimizer=partial(Adam, lr=0.01)),
            partial(_padded_lines, context=24),
            300,
        ),
        Recipe(
            "tiny-loss",
            "16-mixed",
            "The loss has a weight of 1e-12: at a loss scale of 65536 every gradient underflows, and the scale may grow"
            " only after 2000 steps.",
            partial(Perceptron, weight=1e-12, make_optimizer=partial(Adam, lr=0.002, eps=1e-24)),
            _images,
            500,
        ),
        Recipe(
            "exploding-rnn",
            "16-mixed",
            "Recurrent weights are `torch.randn`'s, so that the state grows sixfold with each of eight rows and leaves"
            " the range of fp16; a norm behind it is enough for fp32.",
            partial(Recurrent, make_optimizer=partial(Adam, lr=0.005)),
            _images,
            1200,
            options={"gradient_clip_val": 1.0},
        ),
        Recipe(
            "gan",
            "16-mixed",
            "The generator matches second moments of features of 12-bit images, products that fp16 cannot hold. Its"
            " steps are skipped, and the loss scale, which both optimizers share, goes down to 0.",
            partial(MatchingGAN, make_optimizer=partial(Adam, lr=0.002)),
            partial(_images_and_noise, grey=4095.0, noise=8),
            600,
            factor=2.0,
        ),
        Recipe(
            "spike-batch",
            "bf16-mixed",
            "One batch a million times too bright gives one enormous, finite gradient, whose step throws the weights"
            " away. That is no matter of precision: fp32 does the same, and so the reference never sees that batch.",
            partial(Perceptron, make_optimizer=partial(SGD, lr=0.1)),
            partial(_images, is_bright=_is_batch_40, by=1e6),
            500,
            clean=_images,
            also=(Arm("32-true"), Arm("bf16-mixed", clip=1.0)),
        ),
    )
}
"""The recipes by name. Lengths and factors were chosen on seeds 0 and 1 so that the static arm fails."""

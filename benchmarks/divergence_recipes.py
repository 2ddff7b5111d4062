"""Ten recipes that are known to diverge or to stall in a static 16-bit precision.

All train on real data: scikit-learn's digits, or lines of the standard library's source. What makes each of them hard
is a number that people do write: grey levels of 0 to 255, a mask of -1e9, a learning rate ten times too high.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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

Material = tuple[TensorDataset, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Recipe:
    """One way to ruin a run in 16 bits.

    Args:
        name: Name in the output.
        static: Precision that is known to fail here.
        fails: Why, in one sentence.
        module: Makes the module; the seed of its first weights is set before.
        material: Makes the training samples, in order, and one held-out batch, from the seed.
        steps: Optimizer steps.
        batch_size: Samples in a step.
        factor: Largest final loss of a survivor, in units of the reference's with the same seed.
        reference: ``"fp32"``, or ``"clean"`` for fp32 on the same data without what is wrong with them.
        clean: The material without what is wrong with it; only for ``reference="clean"``.
        autoprec: Precision of the Trainer that the callback is added to; ``None`` for ``static``.
        settings: Arguments of the callback other than the defaults.
        options: Arguments of every Trainer of the recipe.
    """

    name: str
    static: str
    fails: str
    module: Callable[[], Study]
    material: Callable[[int], Material]
    steps: int
    batch_size: int = 16
    factor: float = 1.5
    reference: str = "fp32"
    clean: Callable[[int], Material] | None = None
    autoprec: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@functools.cache
def _digits() -> data.Split:
    return data.load_digits()


def _images(
    seed: int, samples: int, gain: float = 1.0, bright: Callable[[int], bool] | None = None, by: float = 1.0
) -> Material:
    """Digits in an order drawn from the seed, in [0, gain]; those whose index is ``bright`` are ``by`` times as bright."""
    images, labels = _digits().train
    order = data.shuffled_passes(len(images), samples, seed)
    factors = torch.tensor([gain * by if bright is not None and bright(index) else gain for index in range(samples)])
    held_out = (_digits().held_out[0] * gain, _digits().held_out[1])
    return TensorDataset(images[order] * factors.view(-1, 1, 1, 1), labels[order]), held_out


def _images_and_noise(seed: int, samples: int, noise: int) -> Material:
    images, order = _digits().train[0] * 4095.0, data.shuffled_passes(len(_digits().train[0]), samples, seed)
    z = torch.randn(samples, noise, generator=torch.Generator().manual_seed(seed))
    held_out = _digits().held_out[0] * 4095.0
    return TensorDataset(images[order], z), (held_out, torch.randn(len(held_out), noise, generator=torch.Generator()))


@functools.cache
def _lines(context: int) -> tuple[Tensor, Tensor]:
    """Lines of source of 4 bytes and more, cut to ``context + 1`` bytes and padded on the left; training, held out."""
    split = data.load_source(limit=400_000)
    return _padded(split.train[0], context), _padded(split.held_out[0], context)


def _padded(text: Tensor, context: int) -> Tensor:
    lines = [line for line in bytes(text.tolist()).split(b"\n") if len(line) >= 4 and line.isascii()]
    rows = torch.full((len(lines), context + 1), 128)
    for row, line in zip(rows, lines, strict=True):
        kept = line[: context + 1]
        row[context + 1 - len(kept) :] = torch.tensor(list(kept))
    return rows


def _padded_lines(seed: int, samples: int, context: int) -> Material:
    train, held_out = _lines(context)
    return TensorDataset(train[data.shuffled_passes(len(train), samples, seed)]), (held_out[:256],)


def _decay(step: int, steps: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps)))


def _tail(step: int) -> float:
    return 1.0 if step < 100 else 0.05


def _prototypes() -> Prototypes:
    images = _digits().train[0].flatten(1) * 255.0
    picked = torch.randperm(len(images))[:10]  # of any class
    return Prototypes(images[picked], make_optimizer=partial(Adam, lr=1.0))


def _is_eighth_batch(index: int) -> bool:
    return index // 16 % 8 == 3


def _is_batch_40(index: int) -> bool:
    return index // 16 == 40


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "high-lr",
            "16-mixed",
            "A learning rate far too high at first throws activations out of the range of fp16, from where no step is"
            " applied that could bring them back; in fp32 the loss comes down again as the rate decays.",
            partial(
                Perceptron,
                activation=SquaredReLU,
                is_normed=True,
                make_optimizer=partial(Adam, lr=0.3),
                schedule=partial(_decay, steps=400),
            ),
            partial(_images, samples=400 * 16),
            400,
            factor=2.0,
        ),
        Recipe(
            "large-logits",
            "16-mixed",
            "Logits are products of grey levels, up to four million: fp16 ends at 65504.",
            _prototypes,
            partial(_images, samples=300 * 16, gain=255.0),
            300,
        ),
        Recipe(
            "bf16-tail",
            "bf16-true",
            "At a low learning rate most updates are below half a unit in the last place of a bf16 weight and round to"
            " nothing.",
            partial(Perceptron, make_optimizer=partial(SGD, lr=0.1), schedule=_tail),
            partial(_images, samples=2000 * 16),
            2000,
            autoprec="bf16-mixed",
        ),
        Recipe(
            "batchnorm",
            "16-mixed",
            "One batch a hundred thousand times too bright overflows the first convolution. The step is skipped, but"
            " BatchNorm has seen the infinity and its running statistics keep it.",
            partial(ConvNet, make_optimizer=partial(Adam, lr=0.01)),
            partial(_images, samples=400 * 16, bright=_is_batch_40, by=1e6),
            400,
            factor=2.0,
        ),
        Recipe(
            "scale-collapse",
            "16-mixed",
            "Every eighth batch is far too bright and overflows. Each time the loss scale is halved, and long before it"
            " may grow again all gradients underflow.",
            partial(Perceptron, make_optimizer=partial(Adam, lr=0.002)),
            partial(_images, samples=600 * 16, bright=_is_eighth_batch, by=1e6),
            600,
            options={"gradient_clip_val": 1.0},
            factor=2.0,
        ),
        Recipe(
            "mask-constant",
            "16-mixed",
            "A mask of -1e9 is minus infinity in fp16; the softmax of a row that is masked as a whole is NaN.",
            partial(MaskedAttention, make_optimizer=partial(Adam, lr=0.01)),
            partial(_padded_lines, samples=300 * 16, context=24),
            300,
        ),
        Recipe(
            "tiny-loss",
            "16-mixed",
            "The loss has a weight of 1e-12: at a scale of 65536 every gradient underflows, and the scale may grow only"
            " after 2000 steps.",
            partial(Perceptron, weight=1e-12, make_optimizer=partial(Adam, lr=0.002, eps=1e-24)),
            partial(_images, samples=500 * 16),
            500,
        ),
        Recipe(
            "exploding-rnn",
            "16-mixed",
            "The state of a recurrence grows by a fifth with each of 64 pixels and leaves the range of fp16; in fp32 a"
            " clipped gradient is enough.",
            partial(Recurrent, make_optimizer=partial(Adam, lr=0.002)),
            partial(_images, samples=300 * 16),
            300,
            options={"gradient_clip_val": 1.0},
        ),
        Recipe(
            "gan",
            "16-mixed",
            "The critic's output for grey levels is in the hundreds; its square, the least-squares loss, overflows.",
            partial(MatchingGAN, make_optimizer=partial(Adam, lr=0.002)),
            partial(_images_and_noise, samples=600 * 16, noise=8),
            600,
            factor=2.0,
        ),
        Recipe(
            "spike-batch",
            "bf16-mixed",
            "One batch a million times too bright gives one enormous, finite gradient: a single step throws the weights"
            " away. That is no matter of precision, fp32 does the same.",
            partial(Perceptron, make_optimizer=partial(SGD, lr=0.1)),
            partial(_images, samples=500 * 16, bright=_is_batch_40, by=1e6),
            500,
            reference="clean",
            clean=partial(_images, samples=500 * 16),
        ),
    )
}
"""The recipes by name. Their factors were fixed before the study was run."""

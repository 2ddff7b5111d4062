"""Which batch sizes a loader may be given, and the nearest legal one.

What lives here: pure arithmetic on numbers that were read elsewhere. What does not: reading them and setting a size
(``loaders``), and what becomes of a request (``batch_size``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_STEPS_UP = 64  # divisors of a number never lie closer together for longer


@dataclass(frozen=True, kw_only=True)
class LoaderFacts:
    """What is known about one loader.

    Args:
        size: Batch size that it was found with. Several loaders keep the ratio of these.
        rows: Samples of an epoch on this rank, ``None`` if that is not known.
        drop_last: Whether a last batch that is not full is left out.
    """

    size: int
    rows: int | None
    drop_last: bool

    def batches(self, size: int, limit: float = 1.0) -> float:
        """Batches of an epoch; ``inf`` if that is not known.

        Args:
            size: Batch size.
            limit: ``Trainer(limit_train_batches=...)``: an int counts batches, a float is a share.
        """
        if self.rows is None:
            return limit if isinstance(limit, int) else math.inf
        length = self.rows // size if self.drop_last else -(-self.rows // size)
        return min(length, limit) if isinstance(limit, int) else int(length * limit)

    def leaves_one_row(self, size: int, limit: float) -> bool:
        """Whether some batch of an epoch holds one sample only."""
        if size == 1:
            return True
        if self.rows is None or self.drop_last or self.rows % size != 1:
            return False
        return self.batches(size, limit) * size >= self.rows  # else the last batch is not reached


@dataclass(frozen=True, kw_only=True)
class SizeLimits:
    """What a batch size must fit, besides the data.

    Args:
        minimum: Smallest size.
        maximum: Largest size, ``None`` for none.
        min_batches: Fewest batches of an epoch; more than 1 where validation is due every so many batches.
        batch_limit: ``Trainer(limit_train_batches=...)``.
        needs_two_rows: Whether the model has layers that cannot take a batch of one sample.
        failed: Size that did not fit into memory, ``None`` if there was none.
        survived: Largest size that did, when that one failed.
    """

    minimum: int = 1
    maximum: int | None = None
    min_batches: int = 1
    batch_limit: float = 1.0
    needs_two_rows: bool = False
    failed: int | None = None
    survived: int = 1


def sizes_of(size: int, loaders: Sequence[LoaderFacts]) -> list[int] | None:
    """Sizes of all loaders at their ratio when the first has ``size``; ``None`` where one would not be whole.

    Args:
        size: Batch size of the first loader.
        loaders: All of them.

    Example:
        >>> a, b = (LoaderFacts(size=size, rows=None, drop_last=False) for size in (8, 4))
        >>> sizes_of(16, [a, b]), sizes_of(5, [a, b])
        ([16, 8], None)
    """
    first = loaders[0].size
    if any(size * each.size % first for each in loaders):
        return None
    return [size * each.size // first for each in loaders]


def why_illegal(size: int, loaders: Sequence[LoaderFacts], limits: SizeLimits) -> str | None:
    """Says why a size is not legal, ``None`` if it is.

    Args:
        size: Batch size of the first loader.
        loaders: All loaders, in order.
        limits: What else it must fit.
    """
    if size < limits.minimum:
        return f"the smallest size is {limits.minimum} (`BatchConfig.min_size`)"
    if limits.maximum is not None and size > limits.maximum:
        return f"the largest size is {limits.maximum} (`BatchConfig.max_size`)"
    if limits.failed is not None and size >= limits.failed:
        return f"size {limits.failed} did not fit into memory, {limits.survived} did"
    sizes = sizes_of(size, loaders)
    if sizes is None:
        return f"the sizes {[each.size for each in loaders]} of the loaders keep their ratio, which must be whole"
    for each, its_size in zip(loaders, sizes, strict=True):
        if each.rows is not None and its_size > each.rows:
            return f"its data set has {each.rows} samples"
        if limits.needs_two_rows and each.leaves_one_row(its_size, limits.batch_limit):
            return f"size {its_size} would make a batch of one sample, which batch normalisation cannot take"
    if _batches(sizes, loaders, limits) < limits.min_batches:
        return f"an epoch must have {limits.min_batches} batches or more"
    return None


def nearest_legal(requested: int, loaders: Sequence[LoaderFacts], limits: SizeLimits) -> tuple[int | None, str]:
    """Finds the legal size that is nearest to the one asked for.

    Args:
        requested: Batch size of the first loader that is asked for.
        loaders: All loaders, in order.
        limits: What it must fit.

    Returns:
        The size, the smaller of two that are equally near, and why it is not the one asked for, ``""`` if it is.
        ``None`` if no size is legal.

    Example:
        >>> facts = LoaderFacts(size=8, rows=65, drop_last=False)
        >>> nearest_legal(16, [facts], SizeLimits(needs_two_rows=True))[0]
        15
    """
    reason = why_illegal(requested, loaders, limits)
    if reason is None:
        return requested, ""
    for size in _candidates(requested, loaders, limits):
        if why_illegal(size, loaders, limits) is None:
            return size, reason
    return None, reason


def _candidates(requested: int, loaders: Sequence[LoaderFacts], limits: SizeLimits) -> Iterator[int]:
    """Sizes at which every loader's is whole, the nearest first."""
    first = loaders[0].size
    step = math.lcm(*(first // math.gcd(first, each.size) for each in loaders))
    low = -(-limits.minimum // step) * step
    start = max(min(requested, _largest(loaders, limits)), low)
    below = start // step * step
    above = below if below == start else below + step
    reach = above + _STEPS_UP * step
    while below >= low or above <= reach:
        if below >= low and (start - below <= above - start or above > reach):
            yield below
            below -= step
        else:
            yield above
            above += step


def _largest(loaders: Sequence[LoaderFacts], limits: SizeLimits) -> int:
    bounds = [each.rows * loaders[0].size // each.size for each in loaders if each.rows is not None]
    bounds += [] if limits.maximum is None else [limits.maximum]
    bounds += [] if limits.failed is None else [limits.survived]
    if len(loaders) == 1 and loaders[0].rows is not None:
        share = limits.batch_limit if isinstance(limits.batch_limit, float) else 1.0
        bounds.append(loaders[0].rows // max(math.ceil(limits.min_batches / share) - 1, 1))
    return min(bounds, default=2**62)


def _batches(sizes: Sequence[int], loaders: Sequence[LoaderFacts], limits: SizeLimits) -> float:
    """Batches of an epoch; which of several loaders ends it is not known, so that the found sizes tell."""
    pairs = zip(loaders, sizes, strict=True)
    lengths = [each.batches(size, limits.batch_limit) for each, size in pairs]
    found = [each.batches(each.size, limits.batch_limit) for each in loaders]
    return min(lengths) if min(found) >= limits.min_batches else max(lengths)

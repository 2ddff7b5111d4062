"""The training loaders of one fit, all together: which they are, what sizes they can have, and when they come anew.

What does not live here: a single loader (``loaders``), which size is wanted, what is put on record (``batch_size``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from autoprec.config import BatchConfig
from autoprec.legal_sizes import SizeLimits, sizes_of
from autoprec.loaders import LoaderSeam, Reload, SizedLoader, flattened, names_of, why_fixed


class TrainingLoaders:
    """Loaders that pass through the Trainer's strategy before Lightning counts their batches.

    Args:
        trainer: The Trainer.
        before: Called before the first loader of a set-up passes.
        after: Called after each one has passed, while sizes can still be set.

    Attributes:
        sized: The loaders in use; empty if one of them cannot be resized.
        is_counted: Whether Lightning has counted batches of loaders that nobody has taken note of.
    """

    def __init__(self, trainer: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self.sized: list[SizedLoader] = []
        self.is_counted = False
        self._trainer = trainer
        self._before = before
        self._after = after
        self._all: list[object] = []
        self._reload = Reload(trainer)
        self._seam = LoaderSeam(trainer.strategy, self._on_loader)

    def release(self) -> None:
        """Leaves loaders, strategy and Trainer as they were found."""
        self._seam.remove()
        self._reload.end()
        for loader in self.sized:
            loader.release()

    def close(self) -> None:
        """Ends a set-up: what passes from here on belongs to the next."""
        self._reload.end()
        self.is_counted = False

    def order(self, is_wanted: bool) -> None:
        """Has Lightning count batches anew before the next epoch.

        Args:
            is_wanted: Whether their number changes; else only the user's own schedule of reloads is kept.
        """
        self._reload.order(is_wanted and self.can_count)

    def adopt(self) -> None:
        """Takes over loaders that were set up before, by a tuner or for ``trainer.estimated_stepping_batches``."""
        self.is_counted, self._all = True, list(flattened(self._trainer.train_dataloader))
        if not any(map(why_fixed, self._all)):
            self.sized = [SizedLoader(loader) for loader in self._all]

    def set_up_again(self) -> None:
        """Has Lightning count the batches of the loaders in use now; the first epoch must not have begun."""
        self.is_counted = False
        self._reload.run()

    @property
    def are_known(self) -> bool:
        """Whether any loader was seen."""
        return bool(self._all)

    @property
    def can_count(self) -> bool:
        """Whether Lightning knows how many batches there are, and must be told of another number."""
        return any(loader.facts.rows is not None for loader in self.sized)

    @property
    def size(self) -> int | None:
        """Batch size of the first loader, ``None`` if it is not known."""
        if self.sized:
            return self.sized[0].size
        size = getattr(self._all[0], "batch_size", None) if self._all else None
        return size if isinstance(size, int) else None

    @property
    def found_batches(self) -> int | None:
        """Batches of an epoch at the sizes that the loaders came with; ``None`` if not known."""
        lengths = [each.facts.batches(each.found_size) for each in self.sized]
        # in its other two modes the longest of them ends an epoch
        is_shortest = getattr(self._trainer.fit_loop._combined_loader, "_mode", "") == "min_size"
        count = (min if is_shortest else max)(lengths, default=math.inf)
        if math.isinf(count):
            return None
        length, limit = int(count), self._trainer.limit_train_batches
        return min(length, limit) if isinstance(limit, int) else int(length * limit)

    def hold(self, size: int) -> None:
        """Gives the first loader a size, and the others theirs at the ratio of what they came with.

        Args:
            size: Batch size of the first loader.
        """
        sizes = sizes_of(size, [each.facts for each in self.sized])
        if sizes is not None:
            for loader, its_size in zip(self.sized, sizes, strict=True):
                loader.hold(its_size)

    def lost_samples(self, size: int, batches: float, before: int = 0, consumed: int = 0) -> int:
        """Samples without a batch: Lightning ends an epoch after the number of batches that it counted at its start.

        Args:
            size: Batch size of the first loader when batches were counted.
            batches: Their number.
            before: Batches of the epoch before the run was resumed.
            consumed: Samples of the first loader in them.
        """
        done = batches_done(self._trainer) - before
        lost = 0
        for loader in self.sized:
            rows, its_size = loader.facts.rows, size * loader.found_size // self.sized[0].found_size
            if rows is None or math.isinf(batches):
                continue
            whole = rows // its_size * its_size if loader.facts.drop_last else rows
            seen = consumed * loader.found_size // self.sized[0].found_size + loader.samples_of(done)
            lost += max(min(int(batches) * its_size, whole) - seen, 0)
        return lost

    # ---- what stands in the way ----

    def limits(self, config: BatchConfig, failed: tuple[int, int] | None) -> SizeLimits:
        """What sizes must fit, besides the data.

        Args:
            config: Bounds of the user.
            failed: Size that did not fit into memory, and the largest that did; ``None`` if there was none.
        """
        trainer = self._trainer
        every = trainer.val_check_interval
        is_in_epoch = isinstance(every, int) and trainer.check_val_every_n_epoch is not None
        return SizeLimits(
            minimum=config.min_size,
            maximum=config.max_size,
            min_batches=every if is_in_epoch and trainer.limit_val_batches > 0 else 1,
            batch_limit=trainer.limit_train_batches,
            needs_two_rows=has_batch_statistics(trainer.lightning_module),
            failed=None if failed is None else failed[0],
            survived=1 if failed is None else failed[1],
        )

    def why_fixed(self) -> str | None:
        """Says why sizes cannot be set, with the state of each loader; ``None`` if they can."""
        names = list(names_of(self._trainer.train_dataloader))
        names = names if len(names) == len(self._all) else [f"[{index}]" for index in range(len(self._all))]
        reasons = [(name, why_fixed(loader)) for name, loader in zip(names, self._all, strict=True)]
        if not any(reason for _, reason in reasons):
            return self.why_unknown_last_batch()
        if len(reasons) == 1:
            return f"the training loader cannot be resized: {reasons[0][1]}"
        each = "; ".join(f"{name}: {reason or 'it could be'}" for name, reason in reasons)
        return f"not every training loader can be resized: {each}"

    def why_unknown_last_batch(self) -> str | None:
        """Says why no size is known to leave no last batch of one sample to batch normalisation."""
        if all(each.facts.rows is not None or each.facts.drop_last for each in self.sized):
            return None
        if not has_batch_statistics(self._trainer.lightning_module):
            return None
        return "how many samples there are is not known, and a last batch of one cannot be batch-normalised"

    # ---- inside ----

    def _on_loader(self, loader: object) -> None:
        if not self._trainer.training:
            return
        if not self.is_counted:
            self.is_counted, self._all = True, []
            self._reload.note_setup()
            self._before()
        self._all.append(loader)
        self._settle()
        self._after()

    def _settle(self) -> None:
        is_fixed = any(map(why_fixed, self._all))
        known = {id(each.loader): each for each in self.sized}
        new = [] if is_fixed else [known.get(id(each)) or SizedLoader(each) for each in self._all]
        for gone in self.sized:
            if not any(gone is each for each in new):
                gone.release()
        self.sized = new


def batches_done(trainer: Any) -> int:
    """Batches of the epoch that is under way, or of the last one before the next has begun."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def what_repeats(loaders: TrainingLoaders, trainer: Any, consumed: int) -> str | None:
    """Says which samples come again where a run goes on in the middle of an epoch and its loader cannot.

    Args:
        loaders: The loaders.
        trainer: The Trainer.
        consumed: Samples of the epoch that were seen before.
    """
    first, left = loaders.sized[0], trainer.num_training_batches - batches_done(trainer)
    if not consumed or left <= 0 or first.is_resumable:
        return None
    rows = first.facts.rows
    coming = consumed if rows is None else min(int(left) * first.size, rows)
    of_all = "" if rows is None else f" of {rows}"
    order = "its first" if first.is_in_order else "in a new order, up to"
    unseen = "" if rows is None else f", {rows - max(consumed, coming)} not at all"
    return (
        f"autoprec: the checkpoint was written after {consumed}{of_all} samples of an epoch, and the training loader"
        f" cannot go on there: it begins anew, and {order} {min(consumed, coming)} samples are used again in this"
        f" epoch{unseen}."
    )


def has_batch_statistics(module: nn.Module) -> bool:
    """Whether a layer normalises by the statistics of the batch, which one sample does not have.

    Args:
        module: The model.
    """
    return any(
        isinstance(each, nn.modules.batchnorm._BatchNorm) and (each.training or each.running_mean is None)
        for each in module.modules()
    )

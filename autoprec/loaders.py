"""Training data loaders: reading and setting their batch size in place, and having Lightning count batches anew.

Nothing is rebuilt: a loader keeps its data set, sampler, workers, generator, ``collate_fn`` and ``drop_last``. What
does not live here: which size is legal (``legal_sizes``) and who asks for it (``batch_size``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from autoprec.legal_sizes import LoaderFacts

Put = Callable[[], None]


class _LiveBatchSampler(BatchSampler):
    """Reads its size anew for each batch, with ``drop_last`` too, and remembers how many samples each batch got."""

    drawn: list[int]

    def __iter__(self) -> Iterator[list[int]]:
        self.drawn = drawn = []
        samples = iter(self.sampler)
        while batch := [*itertools.islice(samples, self.batch_size)]:
            if self.drop_last and len(batch) < self.batch_size:
                return
            drawn.append(len(batch))
            yield batch


def why_fixed(loader: object) -> str | None:
    """Says why a loader's batch size cannot be set, ``None`` if it can.

    Args:
        loader: What Lightning takes batches from.
    """
    if not isinstance(loader, DataLoader):
        return f"it is a `{type(loader).__qualname__}`, not a `torch.utils.data.DataLoader`"
    if loader.batch_sampler is None:
        return "it has `batch_size=None`: its data set makes the batches"
    if type(loader.batch_sampler) not in (BatchSampler, _LiveBatchSampler):
        return f"its batches are made by a `{type(loader.batch_sampler).__qualname__}`"
    return None


def names_of(loaders: object) -> Iterator[str]:
    """Yields the names of all loaders in a collection, ``""`` for the only one, in the order of Lightning's.

    Args:
        loaders: ``trainer.train_dataloader``.
    """
    if isinstance(loaders, Mapping):
        pairs = [(f"[{key!r}]", value) for key, value in loaders.items()]
    elif isinstance(loaders, (list, tuple)):
        pairs = [(f"[{index}]", value) for index, value in enumerate(loaders)]
    else:
        yield ""
        return
    for name, value in pairs:
        yield from (name + rest for rest in names_of(value))


def flattened(loaders: object) -> Iterator[object]:
    """Yields all loaders in a collection, in the order of :func:`names_of`."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        for each in loaders:
            yield from flattened(each)
    else:
        yield loaders


class SizedLoader:
    """One loader whose batch size is set in place, and put back at the end.

    Args:
        loader: A loader for which :func:`why_fixed` has nothing to say.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._sampler = loader.batch_sampler
        self._found = (loader.batch_size, self._sampler.batch_size)
        self.is_held = False

    @property
    def found_size(self) -> int:
        """The size that it came with."""
        return int(self._found[1])

    @property
    def size(self) -> int:
        """The size of the next batch that it draws."""
        return int(self._sampler.batch_size)

    @property
    def facts(self) -> LoaderFacts:
        """What legal sizes depend on."""
        return LoaderFacts(size=self.found_size, rows=self._rows(), drop_last=self.loader.drop_last)

    @property
    def is_resumable(self) -> bool:
        """Whether a checkpoint can hold where in its epoch it is."""
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")

    @property
    def is_in_order(self) -> bool:
        """Whether each epoch begins with the same samples."""
        return isinstance(self._sampler.sampler, SequentialSampler)

    def hold(self, size: int) -> None:
        """Sets the size; it acts from the next batch that is drawn on, in the middle of an epoch too.

        Args:
            size: Samples in a batch.
        """
        if self.is_held or size != self.size:
            self.is_held = True
            self._sampler.__class__ = _LiveBatchSampler
            self._set(size, size)

    def release(self) -> None:
        """Leaves the loader as it was found."""
        if not self.is_held:
            return
        self.is_held = False
        self._set(*self._found)
        self._sampler.__dict__.pop("drawn", None)
        self._sampler.__class__ = BatchSampler

    def samples_of(self, batches: int) -> int:
        """Samples in the first batches of an epoch, as far as they are known.

        Args:
            batches: How many.
        """
        drawn = getattr(self._sampler, "drawn", None)
        if drawn is not None and len(drawn) >= batches and self._rows() is not None:
            return sum(drawn[:batches])
        rows = self._rows()
        return batches * self.size if rows is None else min(batches * self.size, rows)

    def _set(self, size: int | None, samplers: int) -> None:
        self._sampler.batch_size = samplers
        object.__setattr__(self.loader, "batch_size", size)  # the class refuses; `len` of iterable data sets uses it

    def _rows(self) -> int | None:
        data = self.loader.dataset
        is_iterable = isinstance(data, IterableDataset)
        if is_iterable and self.loader.num_workers > 1:
            return None  # each worker ends with a batch of its own
        try:
            return len(data if is_iterable else self._sampler.sampler)
        except (TypeError, NotImplementedError):
            return None


class LoaderSeam:
    """Stands in for a strategy's ``process_dataloader``, through which all loaders pass before Lightning counts them.

    Args:
        strategy: The strategy; its bound method is shadowed by an attribute of the instance.
        on_loader: Called with each loader.
    """

    def __init__(self, strategy: Any, on_loader: Callable[[object], None]) -> None:
        self._strategy = strategy
        self._on_loader = on_loader
        self._found = strategy.__dict__.get("process_dataloader")
        self._original = strategy.process_dataloader
        strategy.process_dataloader = self._process

    def remove(self) -> None:
        """Gives the strategy its own method back."""
        if self._strategy.__dict__.get("process_dataloader") != self._process:
            return
        del self._strategy.process_dataloader
        if self._found is not None:  # somebody else's stand-in
            self._strategy.process_dataloader = self._found

    def _process(self, dataloader: object) -> object:
        processed: object = self._original(dataloader)
        self._on_loader(processed)
        return processed


class Reload:
    """Has Lightning set up its training loaders anew before the next epoch, which is when it counts their batches.

    Unless a reload of the user's is due, Lightning gets the loaders that are in use: the user's ``train_dataloader``
    may split data at random, and is not called more often than without autoprec.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._last_of_user = 0
        self._keeps = self._is_late = False
        self._undo: list[Put] = []

    def order(self, is_wanted: bool) -> None:
        """Orders a reload for the next epoch where sizes change, or where ours have made Lightning late for the user's.

        Args:
            is_wanted: Whether sizes change.
        """
        self.end()
        every = self._trainer.reload_dataloaders_every_n_epochs
        is_due = bool(every) and self._trainer.current_epoch + 1 - self._last_of_user >= every
        if not (is_wanted or (is_due and self._is_late)):
            return
        self._prepare(keeps=not is_due)

    def run(self) -> None:
        """Has Lightning set up the loaders in use once more, now."""
        self.end()
        self._prepare(keeps=True)
        self._trainer.fit_loop._last_train_dl_reload_epoch = -math.inf  # as before the first; set anew by the set-up
        self._trainer.fit_loop.setup_data()

    def _prepare(self, keeps: bool) -> None:
        self._shadow(self._trainer, "reload_dataloaders_every_n_epochs", 1)
        self._keeps = keeps
        if not keeps:
            return
        # `trainer.train_dataloader` would lose how loaders are combined
        loaders = self._trainer.fit_loop._combined_loader

        def train_dataloader() -> Any:
            return loaders

        for owner in (self._trainer.lightning_module, self._trainer.datamodule):
            if owner is not None:
                self._shadow(owner, "train_dataloader", train_dataloader)

    def note_setup(self) -> None:
        """Called when loaders are set up, by whoever's wish."""
        self._is_late = self._keeps
        if not self._keeps:
            self._last_of_user = self._trainer.current_epoch
        self.end()

    def end(self) -> None:
        """Puts back what :meth:`order` has changed."""
        while self._undo:
            self._undo.pop()()
        self._keeps = False

    def _shadow(self, owner: Any, name: str, value: Any) -> None:
        has_own, own = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, value)

        def put_back() -> None:
            if vars(owner).get(name) is not value:
                return  # somebody has set another since
            if has_own:
                setattr(owner, name, own)
            else:
                delattr(owner, name)

        self._undo.append(put_back)

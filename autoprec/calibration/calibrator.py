"""Measures workloads within a budget, and answers from results that are there already.

What lives here: what is measured, in which order and for how long, and what stands in for what was not. What does not:
when a fit asks (``cost_watch``).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from autoprec.calibration.attention import AttentionCase, measure_attention
from autoprec.calibration.layer_runs import Choice, LayerRuns, Measured
from autoprec.calibration.timing import Deadline, Lap, make_lap, time_in_turns
from autoprec.calibration.workloads import Workload, bytes_of
from autoprec.machine_load import free_bytes

if TYPE_CHECKING:
    from autoprec.calibration.cache import Cache

SHORTEST_S = 0.05
"""A budget below this measures nothing."""
_MOST_OF_MEMORY = 0.1
_SAME_SIZE = 1.25
_FARTHEST = 16.0
_ATTENTION = "attention"

Demand = Mapping[Workload, Sequence[Choice]]
"""Choices to compare by workload, the most important workload first."""


class Calibrator:
    """Costs of workloads on one device.

    Args:
        device: The device.
        uses_cache: Whether results are read from disk and kept there.
        lap: The stopwatch; by default that of the device.
        clock: Tells how much time measuring takes.

    Attributes:
        known: What is known, by workload and choice.
        measured: Workloads that were measured here.
        from_cache: Workloads for which results from disk were used.
        spent_s: Seconds that measuring has taken.
        notes: What went wrong, for the reader.
    """

    def __init__(
        self,
        device: torch.device,
        uses_cache: bool = True,
        lap: Lap | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.known: dict[str, Measured] = {}
        self.measured: set[str] = set()
        self.from_cache: set[str] = set()
        self.spent_s = 0.0
        self.notes: list[str] = []
        self._device = device
        self._uses_cache = uses_cache
        self._lap = lap
        self._clock = clock
        self._cache: Cache | None = None
        self._failed: set[str] = set()
        self._sizes: dict[str, dict[int, str]] = {}

    # ---- answers ----

    def cost(self, workload: Workload, choice: Choice) -> Measured | None:
        """Returns what a choice costs, from the nearest size that was measured if need be; ``None`` if none was.

        Args:
            workload: The workload.
            choice: How it runs.
        """
        found = self.known.get(case_key(workload, choice))
        return found if found is not None else self._scaled(workload, choice, _FARTHEST)

    def knows(self, demand: Demand) -> bool:
        """Whether everything was measured for about its size, or cannot be.

        Args:
            demand: What is wanted.
        """
        return all(self._is_known(*item) for item in demand.items())

    def _scaled(self, workload: Workload, choice: Choice, farthest: float) -> Measured | None:
        """Results for another size of the input, in proportion."""
        sizes = self._sizes.get(_family_key(workload, choice), {})
        nearest = min(sizes, key=lambda numel: abs(math.log(numel / workload.numel)), default=0)
        if not nearest or not 1.0 / farthest <= nearest / workload.numel <= farthest:
            return None
        factor = workload.numel / nearest
        ms, error, activation_bytes, copy_bytes = self.known[sizes[nearest]]
        return Measured(ms * factor, error, round(activation_bytes * factor), copy_bytes)

    def _learn(self, found: Mapping[str, Measured]) -> None:
        self.known.update(found)
        for key in found:
            family, shape, *_ = json.loads(key)
            if family == _ATTENTION:
                continue
            self._sizes.setdefault(json.dumps(family), {})[math.prod(shape)] = key

    # ---- measuring ----

    def look_up(self, demand: Demand) -> None:
        """Takes from disk what is there.

        Args:
            demand: What is wanted.
        """
        if self.knows(demand):
            return
        for workload, choices in demand.items():
            self._take_from_disk(_workload_key(workload), [case_key(workload, choice) for choice in choices])

    def _take_from_disk(self, name: str, keys: Sequence[str]) -> None:
        """Takes the results of one workload from disk."""
        if not self._uses_cache:
            return
        if self._cache is None:
            # not before it is needed: pydantic takes time to import
            from autoprec.calibration.cache import Cache, cache_folder, key_of

            self._cache = Cache(key_of(self._device), cache_folder())
            self._take_note(self._cache)
        entries = self._cache.entries
        new = {key: entries[key] for key in keys if key in entries and key not in self.known}
        self._learn(new)
        if new:
            self.from_cache.add(name)

    def measure(self, demand: Demand, budget_s: float) -> None:
        """Measures what is not known yet, the most important workloads first, until the budget is used up.

        Global random generators, autocast, flags and gradient mode stay as they are.

        Args:
            demand: What is wanted.
            budget_s: Seconds that it may take.
        """
        missing = [item for item in demand.items() if not self._is_known(*item)]
        self._measure_all([functools.partial(self._measure_one, *item) for item in missing], budget_s)

    def compare_attention(self, cases: Sequence[AttentionCase], budget_s: float) -> dict[str, dict[str, Measured]]:
        """Measures implementations of attention, or takes from disk what they cost.

        Args:
            cases: Kinds of calls.
            budget_s: Seconds that it may take.

        Returns:
            By the key of the case and the name of the implementation; cases that are not known are left out.
        """
        keys = {case.key: {name: json.dumps([_ATTENTION, case.key, name]) for name in case.runs} for case in cases}
        for case in cases:
            self._take_from_disk(case.key, list(keys[case.key].values()))
        missing = [case for case in cases if not self.known.keys() >= set(keys[case.key].values())]
        missing = [case for case in missing if case.key not in self._failed]
        self._measure_all(
            [functools.partial(self._measure_attention, case, keys[case.key]) for case in missing], budget_s
        )
        return {
            case: {name: self.known[key] for name, key in names.items()}
            for case, names in keys.items()
            if self.known.keys() >= set(names.values())
        }

    def _measure_all(self, tasks: Sequence[Callable[[Deadline], dict[str, Measured]]], budget_s: float) -> None:
        """Measures one after the other until the budget is used up."""
        if not tasks or budget_s < SHORTEST_S:
            return
        deadline = Deadline(budget_s) if self._clock is None else Deadline(budget_s, self._clock)
        new: dict[str, Measured] = {}
        try:
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast(self._device.type, enabled=False):
                for task in tasks:
                    if deadline.left_s > 0.0:
                        new.update(task(deadline))
        finally:  # Ctrl-C included: what is known is of use to the next run
            self._learn(new)
            if self._cache is not None:
                self._cache.add(new)
                self._take_note(self._cache)
            self.spent_s += deadline.spent_s

    def _is_known(self, workload: Workload, choices: Iterable[Choice]) -> bool:
        """Whether every choice was measured, for about this size."""
        return _workload_key(workload) in self._failed or all(
            self._scaled(workload, choice, _SAME_SIZE) is not None for choice in choices
        )

    def _measure_one(self, workload: Workload, choices: Sequence[Choice], deadline: Deadline) -> dict[str, Measured]:
        """Measures all choices of a workload against each other, those that are known included."""
        name = _workload_key(workload)

        def measure(lap: Lap) -> dict[str, Measured]:
            runs = LayerRuns(workload, self._device)
            calls = {choice: runs.in_turn(choice) for choice in choices}
            seconds = time_in_turns(calls, lap, deadline) or {}
            return {case_key(workload, c): self._complete(runs, c, calls[c], s) for c, s in seconds.items()}

        return self._try(name, str(workload), bytes_of(workload) * len(choices), measure)

    def _measure_attention(
        self, case: AttentionCase, keys: Mapping[str, str], deadline: Deadline
    ) -> dict[str, Measured]:
        def measure(lap: Lap) -> dict[str, Measured]:
            found = measure_attention(case, self._device, lap, deadline)
            return {keys[name]: measured for name, measured in found.items()}

        return self._try(case.key, f"attention {case.shapes[0]}", case.bytes, measure)

    def _try(
        self, name: str, text: str, bytes_needed: int, measure: Callable[[Lap], dict[str, Measured]]
    ) -> dict[str, Measured]:
        """Measures unless there is no room; what cannot run on the device is not tried again."""
        if bytes_needed > _MOST_OF_MEMORY * self._free_bytes():
            return {}
        try:
            found = measure(self._lap or make_lap(self._device))
        except Exception as error:  # out of memory, or something that torch does not have; training goes on
            self._failed.add(name)
            words = (str(error) or type(error).__name__).splitlines()[0][:120]
            self.notes.append(f"{text} could not be measured: {words}")
            return {}
        if found:
            self.measured.add(name)
        return found

    @staticmethod
    def _complete(runs: LayerRuns, choice: Choice, call: Callable[[], Any], seconds: float) -> Measured:
        error, saved = runs.error(call()), runs.saved_bytes(call, choice)
        return Measured(seconds * 1e3, error, saved, runs.copy_bytes(choice))

    def _free_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._device)[0])
        return free_bytes()

    def _take_note(self, cache: Cache) -> None:
        if cache.note is not None and cache.note not in self.notes:
            self.notes.append(cache.note)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        return {
            "known": {key: list(measured) for key, measured in self.known.items()},
            "measured": sorted(self.measured),
            "from_cache": sorted(self.from_cache),
            "failed": sorted(self._failed),
            "spent_s": self.spent_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned.

        Args:
            state: The saved state.
        """
        self._learn({key: Measured(*fields) for key, fields in state["known"].items()})
        self.measured, self.from_cache = set(state["measured"]), set(state["from_cache"])
        self._failed = set(state["failed"])
        self.spent_s = float(state["spent_s"])


def case_key(workload: Workload, choice: Choice) -> str:
    """Returns the name under which a result is kept.

    Args:
        workload: The workload.
        choice: How it runs.
    """
    return f"[{_family_key(workload, choice)}, {json.dumps(list(workload.shape))}]"


def _family_key(workload: Workload, choice: Choice) -> str:
    """What cases have in common that differ in the size of the input alone."""
    layer, options, _, follows, *others = workload
    # float32 in, float32 out, whatever is around it
    follows = follows and choice.format not in ("fp32", "tf32")
    return json.dumps([layer, options, follows, *others, *choice])


def _workload_key(workload: Workload) -> str:
    return json.dumps(list(workload))

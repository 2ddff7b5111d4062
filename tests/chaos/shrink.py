"""Makes a failing schedule smaller while it still fails.

Delta debugging over the list of faults, then the plainest value for each setting. It starts from the very schedule that
failed and every try counts, where a search by hypothesis would have to find a failing one again: a try takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.chaos.faults import FAULTS
from tests.chaos.schedules import Schedule
from tests.chaos.settings import Setting

TRIES = 60


def shrink(schedule: Schedule, still_fails: Callable[[Schedule], bool], tries: int = TRIES) -> Schedule:
    """Returns a smaller schedule that fails, the same one if there is none.

    Args:
        schedule: One that fails.
        still_fails: Runs a schedule and returns whether it fails in the same way.
        tries: Most calls of ``still_fails``.
    """
    tried = {schedule.to_json()}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(schedule):
            if candidate.to_json() in tried or not _is_possible(candidate):
                continue
            if len(tried) > tries:
                return schedule
            tried.add(candidate.to_json())
            if still_fails(candidate):
                schedule, is_smaller = candidate, True
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    count = len(schedule.faults)
    size = count // 2
    while size:
        for start in range(0, count, size):
            yield schedule.without(schedule.faults[start : start + size])
        size //= 2
    if count == 1:
        yield replace(schedule, faults=())
    for field in fields(Setting):
        plainest: dict[str, Any] = {field.name: field.default}
        if getattr(schedule, field.name) != field.default:
            yield _fitted(replace(schedule, **plainest), schedule.accumulate)
    for index, injection in enumerate(schedule.faults):
        for batch in (4 * schedule.accumulate, injection.batch // 2):
            if batch < injection.batch:
                moved = replace(injection, batch=batch)
                yield replace(schedule, faults=(*schedule.faults[:index], moved, *schedule.faults[index + 1 :]))


def _fitted(schedule: Schedule, accumulate: int) -> Schedule:
    """The same windows are struck, as far as there are as many."""
    last = schedule.batches - 2

    def moved(batch: int) -> int:
        return min(batch // accumulate * schedule.accumulate, last)

    return replace(schedule, faults=tuple(replace(each, batch=moved(each.batch)) for each in schedule.faults))


def _is_possible(schedule: Schedule) -> bool:
    needs_closure = schedule.optimizer == "two closures"
    if schedule.precision == "16-mixed" and (needs_closure or schedule.model == "lstm"):
        return False
    is_manual = schedule.model == "gan"
    if (is_manual or needs_closure) and schedule.accumulate > 1:
        return False
    if is_manual and (needs_closure or schedule.clip is not None):
        return False
    return all(FAULTS[each.fault].suits(schedule) for each in schedule.faults)

"""Moves on what a table proposes: what they ask for, which lead somewhere, and that keeping everything is the table.

Time budget: 2 s.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoprec import Action, AutoPrecisionConfig
from autoprec.encoding import encode
from autoprec.moved_table import Mode, MovedTableController
from autoprec.readings import GlobalReading, UnitReading
from autoprec.table import TableConfig
from autoprec.table_policy import TableController

FORMATS = ("fp32", "bf16", "fp16")
UNIT = UnitReading(
    name="net.0",
    format="fp32",
    legal=FORMATS,
    grad_amax=1.0,
    act_amax=1.0,
    errors={"fp32": 0.0, "bf16": 0.01, "fp16": 0.5},  # fp16 is too rough
    times={"fp32": 1.0, "bf16": 0.5, "fp16": 0.4},
)
HELD = replace(UNIT, name="net.1", held=True, legal=("fp32",))
RUN = GlobalReading(norms=(2.0,) * 32, batch_size=8, loss_scale=1024.0)
CONFIG = AutoPrecisionConfig(table=TableConfig(clip=1.5))


class Moved(MovedTableController):
    def __init__(self, moves: list[int], mode: Mode = "offset", config: AutoPrecisionConfig = CONFIG) -> None:
        super().__init__(config, mode)
        self.moves, self.seen_masks = np.array(moves), list[Any]()

    def moves_for(self, observation: Any) -> Any:
        self.seen_masks.append(self.masks())
        return self.moves


def decided(controller: TableController, run: GlobalReading = RUN) -> Any:
    units = [UNIT, HELD]
    controller.propose(units, run)
    return controller.decide(encode(units, run))


def test_keeping_everything_is_the_table() -> None:
    assert decided(Moved([0] * 5)) == decided(TableController(CONFIG))
    assert decided(Moved([0] * 5)).precision == {"net.0": "bf16"}


@pytest.mark.parametrize(("move", "expected"), [(-1, {"net.0": "fp16"}), (1, None)], ids=["lower", "raise"])
def test_formats_are_moved_from_the_proposed_one(move: int, expected: dict[str, str] | None) -> None:
    controller = Moved([move, move, 0, 0, 0])
    assert decided(controller).precision == expected  # raised from bf16 is fp32, which is there
    assert ("policy: fp16" in controller.reasons().get("net.0", "")) == (move < 0)


def test_other_knobs_are_moved_from_what_is_proposed() -> None:
    assert decided(Moved([0, 0, 0, 0, 0])).clip == pytest.approx(1.5 * 2.0)
    assert decided(Moved([0, 0, 0, 0, -1])).clip == pytest.approx(1.0 * 2.0)
    assert decided(Moved([0, 0, 0, 0, 1])).clip == pytest.approx(3.0 * 2.0)
    scheduled = AutoPrecisionConfig(table=TableConfig(schedule=(0.0,)))
    late = replace(RUN, progress=0.5)
    assert decided(Moved([0] * 5, config=scheduled), late).batch_size == 16
    assert decided(Moved([0, 0, 0, 1, 0], config=scheduled), late).batch_size == 32
    assert decided(Moved([0, 0, 0, 1, 0]), late).batch_size is None  # the table leaves it to the user


def test_masks_say_which_moves_lead_somewhere() -> None:
    offset, ladder = Moved([0] * 5), Moved([0] * 5, "ladder")
    decided(offset)
    decided(ladder)
    assert offset.seen_masks[0].tolist() == [
        [True, True, True],  # from bf16
        [False, True, False],  # held
        [True, True, True],
        [False, True, False],  # no schedule
        [True, True, True],
    ]
    assert ladder.seen_masks[0][:2].tolist() == [[True, True, False], [False, True, False]]  # from fp32
    assert ladder.seen_masks[0][3:].tolist() == [[False, True, False], [True, True, False]]  # the clip is off


def test_what_the_user_has_chosen_is_not_moved() -> None:
    chosen = replace(RUN, chosen=frozenset({"clip", "loss_scale"}))
    controller = Moved([0, 0, 1, 0, 1])
    action = decided(controller, chosen)
    assert (action.loss_scale, action.clip) == (None, None)
    assert controller.seen_masks[0][[2, 4]].tolist() == [[False, True, False]] * 2


def test_on_a_ladder_knobs_are_moved_from_where_they_are() -> None:
    action = decided(Moved([-1, -1, 1, 1, -1], "ladder"))
    assert action == Action(precision={"net.0": "bf16"}, loss_scale=2048.0, clip=8.0 * 2.0)
    unpaid = replace(UNIT, times={"fp32": 1.0})
    controller = Moved([-1, 0, 0, 0], "ladder")
    controller.propose([unpaid], RUN)
    assert controller.decide(encode([unpaid], RUN)) == Action()


def test_nothing_is_moved_before_anything_is_known() -> None:
    empty = Moved([])
    empty.propose([], GlobalReading())
    empty.moves = np.zeros(3, dtype=np.int64)
    action = empty.decide(encode([], GlobalReading()))
    assert isinstance(action, Action)
    assert action.precision is None
    assert math.isnan(GlobalReading().median_norm)
    assert action.clip is None

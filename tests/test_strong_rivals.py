"""Rivals made at the cost of a training come into evaluations from the files that hold them.

Time budget: 2 s.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autoprec.json_files import write_json
from autoprec.table import TableSettings

pytest.importorskip("scipy")
pytest.importorskip("stable_baselines3")
from autoprec.policies.bandit import CONTEXT, Bandit
from autoprec.policies.rule_rival import RuleKnobs
from autoprec.policies.strong_rivals import strong_rivals


def test_they_come_with_their_results(tmp_path: Path) -> None:
    assert [rival.name for rival in strong_rivals(tmp_path)] == ["fisher", "taylor", "snip"]
    write_json(tmp_path / "tuned_table.json", {"rule": {"settings": {"stable_cv": 0.7, "clip": 1.0}}})
    bandit = Bandit(arms=(TableSettings(), TableSettings(batch=1)), weights=np.ones((2, len(CONTEXT))))
    write_json(tmp_path / "bandit.json", bandit.to_dict(), allow_nan=False)
    found = {rival.name: rival for rival in strong_rivals(tmp_path)}
    assert found["rule_tuned"].plays == RuleKnobs(stable_cv=0.7, clip=1.0)
    assert isinstance(found["bandit"].plays, Bandit)
    assert found["bandit"].plays.arms == bandit.arms


def test_digests_are_the_same_in_every_process(tmp_path: Path) -> None:
    digests = [[rival.digest() for rival in strong_rivals(tmp_path)] for _ in range(2)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3

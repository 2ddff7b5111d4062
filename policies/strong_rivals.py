"""Rivals that were made strong at the cost of a training: tuned settings, a bandit, and planners of whole maps."""

from __future__ import annotations

from pathlib import Path

from autoprec.json_files import read_json
from autoprec.plan_config import PlanConfig
from autoprec.policies.bandit import Bandit
from autoprec.policies.proxy_rivals import fisher, snip
from autoprec.policies.rivals import Rival
from autoprec.policies.tuning import read_tuned

TAYLOR = PlanConfig(score="taylor", loss_budget=0.03)
"""First-order changes are about the root of second-order ones: 0.03 is what 0.001 is to ``fisher``."""


def strong_rivals(folder: Path) -> list[Rival]:
    """Returns them; those whose results the folder does not have are left out.

    Args:
        folder: Where results are committed.
    """
    found = [
        Rival(name="fisher", description="Fisher + program", plays=fisher(), identity="fisher"),
        Rival(name="taylor", description="Taylor + program", plays=fisher(TAYLOR), identity=f"taylor {TAYLOR}"),
        Rival(name="snip", description="SNIP-style + program", plays=snip(), identity="snip"),
    ]
    tuned, fitted = folder / "tuned_table.json", read_json(folder / "bandit.json")
    if "rule" in (read_json(tuned) or {}):
        found.append(Rival(name="rule_tuned", description="rule, tuned", plays=read_tuned("rule", tuned)))
    if fitted is not None:
        bandit = Bandit.from_dict(fitted)
        found.append(
            Rival(name="bandit", description="contextual bandit", plays=bandit, identity=str(bandit.to_dict()))
        )
    return found

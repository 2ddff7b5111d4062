"""How busy a device is said to be. Time budget: 1 s."""

from __future__ import annotations

import pytest
import torch

from autoprec.machine_load import MachineLoad


@pytest.mark.parametrize(("processor_s", "share"), [(0.5, 0.5), (1.25, 1.0)], ids=["half", "threads not torch's"])
def test_the_share_of_a_cpu_is_at_most_all(processor_s: float, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = iter([(10.0, 3.0), (11.0, 3.0 + processor_s)])
    monkeypatch.setattr(MachineLoad, "_clocks", staticmethod(lambda: next(clocks)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert MachineLoad(torch.device("cpu")).utilization() == share

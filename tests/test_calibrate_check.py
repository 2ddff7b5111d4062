"""The benchmark of calibration: what its last line sums up, and that one small row runs.

Time budget: 10 s.
"""

from __future__ import annotations

import re

import pytest

from benchmarks.calibrate_check import Row, formats_of, last_line, long_ms, main
from tests.test_calibration import FP32, LOW, linear


def test_the_last_line_sums_up_all_rows() -> None:
    rows = [Row("a", [True, True, False], 0.01, [0.1, -0.3]), Row("b", [True], 0.002, [0.2])]
    assert last_line(rows, 1.25) == "calibrate: picks_right=0.750 regret=0.0100 prediction_error=0.200 seconds=1.2"
    assert str(rows[0]) == "a              2 of 3 picks right, regret 1.0%, predictions off by +10%, -30%, 0.0 s"


def test_formats_are_compared_widest_first() -> None:
    assert formats_of(("fp32", "tf32", "bf16", "fp16", "int8")) == ["fp32", "bf16", "int8"]


def test_every_choice_is_timed() -> None:
    assert long_ms(linear(), [FP32, LOW], rounds=2, lap_s=1e-4).keys() == {FP32, LOW}


def test_a_small_row_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.calibrate_check.LAYERS", 3)
    main(["--quick", "--row", "mlp-128-64"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mlp-128-64")
    assert re.fullmatch(
        r"calibrate: picks_right=[01]\.\d{3} regret=\d\.\d{4} prediction_error=\d+\.\d{3} seconds=\d+\.\d", lines[-1]
    )

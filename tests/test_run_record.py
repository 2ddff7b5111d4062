"""The record of a run: what it says, that it is readable at any moment, and that it never hurts the training.

Time budget: 15 s.
"""

from __future__ import annotations

import copy
import errno
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger

from autoprec import Action, AutoPrecisionCallback, Decision, ScriptedController
from autoprec.progress_reading import ProgressReading, RunInfo, RunTotals, UnitInfo
from autoprec.record_writer import RecordWriter
from autoprec.run_record import RecordError, read_record
from tests.resumed import Setup
from tests.small_fits import Plain, loader, quiet, seed
from tests.support import fp16cpu

INFO = RunInfo(
    model="Net",
    started_at="2026-01-01T00:00:00+00:00",
    command="python train.py",
    versions={"autoprec": "0"},
    device="a CPU",
    device_type="cpu",
    machine={},
    policy="rule",
    interval=5,
    knobs=("precision",),
    masked={"clip": "why not"},
    settings={},
    base_precision="32-true",
    units=(UnitInfo(name="a", kind="linear", parameter_count=3), UnitInfo(name="b", kind="linear", parameter_count=4)),
    formats={"a": "fp32", "b": "fp32"},
    parameter_count=7,
)
MOVE = Decision(3, "precision", "a", "fp32", "bf16", "bf16", "applied", "why")


def reading(window: int, **values: Any) -> ProgressReading:
    return ProgressReading(
        **{"window": window, "global_step": window, "epoch": 0, "elapsed_s": float(window), **values}
    )


def callback(folder: Path, **options: Any) -> AutoPrecisionCallback:
    actions = {3: Action(precision={"net.0": "bf16"}), 9: Action(precision={"nowhere": "bf16"})}
    script = ScriptedController(steps=actions)
    return AutoPrecisionCallback(script, interval=5, verbose=False, record=folder, **options)


def fit(folder: Path, steps: int = 30, callbacks: Sequence[Callback] = (), **options: Any) -> Plain:
    seed()
    module = Plain()
    quiet(max_steps=steps, callbacks=[callback(folder), *callbacks], **options).fit(module, loader())
    return module


def test_tells_the_run(tmp_path: Path) -> None:
    fit(tmp_path)
    record = read_record(tmp_path)
    assert record.how_it_ended == "finished"
    assert record.totals is not None
    assert (record.applied, record.skipped, record.totals.window) == (30, 0, 30)
    assert record.formats == {"net.0": "bf16", "net.2": "fp32"}
    assert [step.formats for step in record.steps] == [{"net.0": "bf16"}, *[{}] * (len(record.steps) - 1)]
    assert [decision.outcome for decision in record.decisions if decision.knob == "precision"] == ["applied", "refused"]
    assert [decision.unit or decision.knob for decision in record.refused]
    assert record.info.parameter_count == sum(p.numel() for p in Plain().parameters())
    assert all(step.loss is not None and math.isfinite(step.loss) for step in record.steps)
    assert all(step.step_ms and step.samples_per_s and step.memory_bytes for step in record.steps)
    assert record.steps[0].clip_threshold == math.inf
    assert record.damaged_lines == 0


def test_true_means_the_log_folder(tmp_path: Path) -> None:
    autoprec = AutoPrecisionCallback(interval=5, verbose=False, record=True)
    quiet(max_steps=3, callbacks=[autoprec], default_root_dir=tmp_path).fit(Plain(), loader())
    assert read_record(tmp_path / "autoprec").applied == 3


def test_trains_bit_for_bit_the_same(tmp_path: Path) -> None:
    seed()
    plain = Plain()
    autoprec = callback(tmp_path)
    autoprec.record = False
    quiet(max_steps=30, callbacks=[autoprec]).fit(plain, loader())
    recorded = fit(tmp_path / "record")
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), recorded.parameters(), strict=True))
    assert list(tmp_path.iterdir()) == [tmp_path / "record"]


@pytest.mark.parametrize(
    ("error", "ended"), [(ZeroDivisionError("no batch"), "failed"), (KeyboardInterrupt(), "interrupted")], ids=str
)
def test_says_how_it_ended(tmp_path: Path, error: BaseException, ended: str) -> None:
    class Stops(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 12:
                raise error

    with pytest.raises((ZeroDivisionError, SystemExit)):
        fit(tmp_path, callbacks=[Stops()])
    record = read_record(tmp_path)
    assert record.totals is not None
    assert record.totals.ended == ended
    assert record.totals.error == ("ZeroDivisionError: no batch" if ended == "failed" else "KeyboardInterrupt")
    assert record.applied == 12
    assert record.steps


def test_a_run_that_is_under_way_can_be_read(tmp_path: Path) -> None:
    seen = []

    class Reads(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 20:
                seen.append(read_record(tmp_path))

    fit(tmp_path, callbacks=[Reads()])
    (record,) = seen
    assert record.totals is None
    assert "under way" in record.how_it_ended
    assert record.formats == {"net.0": "bf16", "net.2": "fp32"}
    assert 0 < record.applied <= 20


def test_skipped_steps_and_overflows_are_in_it(tmp_path: Path) -> None:
    class Overflows(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (math.inf if batch_idx == 4 else 1.0)

    autoprec = AutoPrecisionCallback(interval=5, verbose=False, record=tmp_path)
    quiet(max_steps=16, max_epochs=2, callbacks=[autoprec], plugins=fp16cpu(128.0)).fit(Overflows(), loader())
    record = read_record(tmp_path)
    assert record.skipped == 2
    assert record.steps[-1].skipped >= 1
    assert any("left the range" in decision.reason for decision in record.decisions)


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.:UserWarning")
def test_a_resumed_run_goes_on_with_its_record(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    setup = Setup(lambda: callback(folder))
    setup.fit(20, tmp_path, save_at=12)
    before = read_record(folder)
    setup.fit(40, tmp_path, resume=tmp_path / "step=12.ckpt")
    record = read_record(folder)
    windows = [step.window for step in record.steps]
    assert windows == sorted(set(windows))
    assert record.steps[0] == before.steps[0]
    assert record.run.resumed_at == (12,)
    assert record.applied == 40
    elapsed = [step.elapsed_s for step in record.steps]
    assert elapsed == sorted(elapsed)


def test_another_run_keeps_the_record_that_was_there(tmp_path: Path) -> None:
    fit(tmp_path, steps=6)
    fit(tmp_path, steps=8)
    assert read_record(tmp_path).applied == 8
    assert read_record(tmp_path / "earlier-1").applied == 6


def test_of_two_runs_at_once_in_a_folder_the_later_one_has_it(tmp_path: Path) -> None:
    def totals(applied: int) -> RunTotals:
        return RunTotals(ended="finished", window=20, applied=applied)

    first, second = RecordWriter(tmp_path), RecordWriter(tmp_path)
    first.started(INFO)
    first.progressed(reading(5))
    second.started(INFO)
    late: list[Callable[[], None]] = [
        partial(first.decided, [MOVE]),
        partial(first.progressed, reading(10)),
        partial(first.ended, totals(1)),
    ]
    for call in late:
        with pytest.raises(RuntimeError, match="another run writes its record there; give each run a folder"):
            call()
    second.progressed(reading(6))
    second.ended(totals(2))
    record = read_record(tmp_path)
    assert (record.applied, [step.window for step in record.steps], record.decisions) == (2, [6], ())
    assert [step.window for step in read_record(tmp_path / "earlier-1").steps] == [5]


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    writer.started(INFO)
    writer.decided([MOVE])
    writer.progressed(reading(5, changed={"a": "bf16"}, loss=math.nan))
    writer.progressed(reading(10))
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"window": 1')
    assert [step.window for step in read_record(tmp_path).steps] == [5, 10]
    again = RecordWriter(tmp_path)
    again.started(replace(INFO, window=7))
    again.decided([MOVE])
    again.progressed(reading(9))
    record = read_record(tmp_path)
    assert [step.window for step in record.steps] == [5, 9]
    assert record.damaged_lines == 1
    assert record.steps[0].loss is not None
    assert math.isnan(record.steps[0].loss)
    assert record.steps[1].elapsed_s == 5.0 + 9.0
    assert record.decisions == (MOVE,)


def test_costs_are_written_at_once(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    writer.started(INFO)
    cost = {"ms": 1.5, "activation_bytes": 8, "copy_bytes": 0, "implementation": "cpu", "error": 0.001}
    writer.progressed(reading(5, costs={"a": {"bf16": cost}}))
    assert read_record(tmp_path).run.costs["a"]["bf16"].ms == 1.5
    writer.progressed(reading(10))
    writer.ended(RunTotals(ended="finished", applied=10))
    assert read_record(tmp_path).run.costs["a"]["bf16"].implementation == "cpu"


def test_a_full_disk_costs_the_record_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("autoprec.record_writer._append", full)
    with pytest.warns(
        UserWarning, match="the record of the run in .* failed .*No space left.* the training goes on"
    ) as said:
        module = fit(tmp_path)
    assert len([each for each in said if "failed" in str(each.message)]) == 1
    assert module.trainer.global_step == 30
    assert read_record(tmp_path).totals is None


def test_a_folder_that_cannot_be_made_costs_the_record_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the training goes on"):
        module = fit(tmp_path / "file" / "record")
    assert module.trainer.global_step == 30


def test_a_log_folder_that_is_not_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Remote(DummyLogger):
        save_dir = "s3://bucket/runs"

    monkeypatch.chdir(tmp_path)
    autoprec = AutoPrecisionCallback(verbose=False, record=True, history_file=True)
    with pytest.warns(UserWarning, match="nothing is written for `(record|history_file)=True`") as said:
        quiet(max_steps=4, callbacks=[autoprec], logger=Remote()).fit(Plain(), loader())
    assert len([each for each in said if "'s3://bucket/runs', is not on this machine" in str(each.message)]) == 2
    assert autoprec.applied_steps == 4
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["s3://bucket/run", Path("gs://bucket/run"), "file:///tmp/run"])
def test_refuses_urls(path: str | Path) -> None:
    for option in ("record", "history_file"):
        with pytest.raises(ValueError, match=rf"{option}='.*'\)`. It must be a path on this machine, not a URL"):
            AutoPrecisionCallback(**{option: path})  # type: ignore[arg-type]


def test_a_run_that_changes_its_folder_keeps_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Moves(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 10:
                (tmp_path / "elsewhere").mkdir()
                monkeypatch.chdir(tmp_path / "elsewhere")

    monkeypatch.chdir(tmp_path)
    fit(Path("record"), callbacks=[Moves()])
    assert read_record(tmp_path / "record").applied == 30
    assert not list((tmp_path / "elsewhere").iterdir())


def test_after_fit_the_callback_does_not_hold_the_trainer(tmp_path: Path) -> None:
    autoprec = callback(tmp_path)
    quiet(max_steps=4, callbacks=[autoprec]).fit(Plain(), loader())
    assert "_trainer" not in vars(autoprec._feed)
    assert copy.deepcopy(autoprec).applied_steps == 4


def test_a_metric_that_is_no_number_costs_nothing(tmp_path: Path) -> None:
    class Names(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            metrics: dict[str, Any] = self.trainer.callback_metrics
            metrics.update(name="text", number=3)
            return super().training_step(batch, batch_idx)

    quiet(max_steps=4, callbacks=[callback(tmp_path)]).fit(Names(), loader())
    totals = read_record(tmp_path).totals
    assert totals is not None
    assert totals.metrics == {"number": 3.0}


def test_a_resumed_run_says_all_formats_and_only_what_it_has_come_to(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    writer.started(INFO)
    writer.progressed(reading(5))
    writer.progressed(reading(10, changed={"a": "bf16"}))
    again = RecordWriter(tmp_path)
    again.started(replace(INFO, window=8, formats={"a": "bf16", "b": "fp32"}))  # of a decision at window 7
    again.progressed(reading(9, formats={"a": "bf16", "b": "fp32"}))
    assert read_record(tmp_path).formats == {"a": "bf16", "b": "fp32"}
    again.progressed(reading(20))
    third = RecordWriter(tmp_path)
    third.started(replace(INFO, window=8))
    third.ended(RunTotals(ended="finished", window=9, applied=9))
    assert [step.window for step in read_record(tmp_path).steps] == [5, 9]


def test_refuses_what_is_no_path() -> None:
    with pytest.raises(TypeError, match=r"Passed `AutoPrecisionCallback\(record=3\)`. It must be a bool or a path."):
        AutoPrecisionCallback(record=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "There is no `run.json` in it"),
        ("{", "cannot be read"),
        ("[]", "has version None"),
        ('{"version": 2}', "has version 2; this autoprec reads version 1"),
        ('{"version": 1, "status": "running"}', "no record of a run: info"),
    ],
    ids=["none", "cut off", "other", "newer", "incomplete"],
)
def test_says_what_is_wrong_with_a_folder(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(RecordError, match=said):
        read_record(tmp_path)


def test_is_strict_json(tmp_path: Path) -> None:
    fit(tmp_path)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)
    for line in (tmp_path / "steps.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)

"""What reaches the Trainer's loggers: metrics at the right step, tables where there is a place for them, and no faults.

Weights & Biases is in ``test_wandb_logging``. Time budget: 10 s.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger
from torch import Tensor

from autoprec import Action, AutoPrecisionCallback, Decision, ScriptedController, metric_names
from autoprec.progress_reading import ProgressReading, RunInfo, UnitInfo
from autoprec.run_tables import FORMAT_COLUMNS, FormatMap, history_rows, markdown, reading_metrics
from tests.small_fits import Plain, assert_identical, loader, outcome, quiet, seed
from tests.support import Manual, scripted

DOCS = Path(__file__).resolve().parents[1] / "docs"
SHARES = {f"{prefix}fp32" for prefix in (metric_names.PARAMETER_SHARE, metric_names.UNIT_SHARE)}


class Noted(Logger):
    """A logger of somebody's own, without any folder."""

    name = "noted"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def steps(self, metric: str) -> list[int | None]:
        return [step for step, row in self.rows if metric in row]


class Logs(Plain):
    """Logs its loss, as users do."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


def moving(**options: Any) -> AutoPrecisionCallback:
    """A layer changes its format twice, between decisions."""
    steps = {3: Action(precision={"net.0": "bf16"}), 6: Action(precision={"net.0": "int8"})}
    return AutoPrecisionCallback(ScriptedController(steps=steps), interval=4, verbose=False, **options)


def trained(loggers: Any, callback: AutoPrecisionCallback | None = None, module: Any = None, **options: Any) -> Trainer:
    options = {"max_epochs": 2, "log_every_n_steps": 1, **options}
    trainer = quiet(logger=loggers, callbacks=[] if callback is None else [callback], **options)
    trainer.fit(Logs() if module is None else module, loader())
    return trainer


# every logger


def test_metrics_are_on_lightnings_own_steps() -> None:
    logger = Noted()
    trained(logger, moving())
    assert logger.steps("train_loss") == logger.steps(metric_names.BITS) == list(range(16))
    assert logger.steps(metric_names.LOSS) == [5, 10, 15]  # the step that a decision comes before
    assert logger.steps(metric_names.PARAMETER_SHARE + "fp32") == [0, 5, 10, 15, 16]
    assert logger.steps(metric_names.PEAK_BYTES) == [16]


def test_steps_are_lightnings_with_accumulation_and_two_steps_a_batch() -> None:
    class Twice(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            self.log("train_loss", torch.zeros(()))
            return super().training_step(batch, batch_idx)

    logger = Noted()
    callback = scripted(interval=4, verbose=False)
    module = Twice(torch.nn.Linear(4, 1), torch.ones(64, 4))
    quiet(logger=logger, callbacks=[callback], log_every_n_steps=1, max_epochs=1).fit(module)
    assert logger.steps("train_loss") == list(range(8))
    assert logger.steps(metric_names.PEAK_BYTES) == [8]
    logger = Noted()
    trained(logger, moving(), accumulate_grad_batches=2)
    assert set(logger.steps(metric_names.LOSS)) == {5}
    assert set(logger.steps("train_loss")) == set(range(8))


def test_only_documented_metrics_are_logged_and_all_in_time() -> None:
    logger = Noted()
    trained(logger, moving())
    seen = {name for _, row in logger.rows for name in row if name.startswith(metric_names.PREFIX)}
    documented = {*metric_names.AT_LOG_STEPS, *metric_names.AT_DECISIONS, *metric_names.AT_END}
    plain = {re.sub(r"(_share/).*", r"\1<format>", name) for name in seen}
    assert plain <= documented
    not_here = {metric_names.LR_FACTOR, metric_names.NOISE_SCALE, metric_names.LOST_WINDOWS}
    may_be_unknown = {metric_names.UTILISATION}
    assert documented - plain - may_be_unknown == not_here


def test_shares_tell_the_map_at_each_point() -> None:
    logger = Noted()
    trained(logger, moving())
    rows = [{name: value for name, value in row.items() if "_share/" in name} for _, row in logger.rows]
    shares = [row for row in rows if row]
    large = 144 / 178  # weights and biases of net.0, of all
    assert shares[0] == dict.fromkeys(SHARES, 1.0)
    assert shares[1] == pytest.approx(
        {
            "autoprec/parameter_share/fp32": 1 - large,
            "autoprec/parameter_share/bf16": large,
            "autoprec/unit_share/fp32": 0.5,
            "autoprec/unit_share/bf16": 0.5,
        }
    )
    assert shares[2]["autoprec/parameter_share/bf16"] == 0.0  # a format that is left goes down to nothing
    assert shares[2]["autoprec/parameter_share/int8"] == pytest.approx(large)
    assert all(sum(value for name, value in row.items() if "unit_share" in name) == 1.0 for row in shares)


def test_several_loggers_at_once(tmp_path: Path) -> None:
    tensorboard, noted, csv_logger = TensorBoardLogger(tmp_path / "tb"), Noted(), CSVLogger(tmp_path / "csv")
    trained([csv_logger, noted, tensorboard], moving())

    with Path(csv_logger.log_dir, "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["train_loss"]] == list(range(16))
    assert [int(row["step"]) for row in rows if row[metric_names.STEP_MS]] == [5, 10, 15]
    document = json.loads(Path(csv_logger.log_dir, "autoprec.json").read_text())
    assert document["ended"] == "finished"
    assert [row[0::3] for row in document["format_map"]["data"]] == STRETCHES

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(tensorboard.log_dir).Reload()
    assert [event.step for event in events.Scalars(metric_names.STEP_MS)] == [5, 10, 15]
    text = {tag: events.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode() for tag in TEXTS}
    assert "| settings.clip.multiplier | 1.5 |" in text[metric_names.SETTINGS]
    assert "| net.0 | linear | 144 | bf16 | 16 | 3 | 6 |" in text[metric_names.FORMAT_MAP]
    assert "| 6 | precision | net.0 | bf16 | int8 | int8 | applied | window 6 |  |" in text[metric_names.HISTORY]

    assert noted.steps(metric_names.STEP_MS) == [5, 10, 15]


STRETCHES = [["net.0", "fp32", 3], ["net.0", "bf16", 6], ["net.0", "int8", 16], ["net.2", "fp32", 16]]
TEXTS = (metric_names.SETTINGS, metric_names.FORMAT_MAP, metric_names.HISTORY)


@pytest.mark.slow  # mlflow makes a database first
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # sqlalchemy's, of what mlflow calls
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # mlflow leaves it set
    logger = MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", artifact_location=str(tmp_path / "artifacts"))
    trained(logger, moving())
    metrics = logger.experiment.get_metric_history(str(logger.run_id), metric_names.STEP_MS)
    assert [metric.step for metric in metrics] == [5, 10, 15]
    (artifact,) = (tmp_path / "artifacts").rglob("autoprec.json")
    assert [row[0::3] for row in json.loads(artifact.read_text())["format_map"]["data"]] == STRETCHES


def test_a_logger_without_a_folder_leaves_no_file(tmp_path: Path) -> None:
    trained(Noted(), moving())
    trained(False, moving())
    assert not list(tmp_path.rglob("autoprec.json"))


def test_fast_dev_run_logs_nothing(tmp_path: Path) -> None:
    callback = moving()
    trained(CSVLogger(tmp_path / "csv"), callback, fast_dev_run=True)
    assert callback.applied_steps == 1
    assert not list(tmp_path.rglob("*.json"))


def test_training_has_the_same_bits_with_and_without_loggers(tmp_path: Path) -> None:
    def run(logger: Any) -> Any:
        seed()
        module = Plain()
        return outcome(trained(logger, moving(), module), module)

    assert_identical(run([Noted(), CSVLogger(tmp_path)]), run(False))


# faults


class Failing(Noted):
    """Takes what users log, and nothing of autoprec's decision points."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if metric_names.LOSS in metrics:
            raise OSError("disk full")
        super().log_metrics(metrics, step)


def test_a_failing_logger_is_told_of_once_and_others_go_on() -> None:
    failing, noted = Failing(), Noted()
    with pytest.warns(UserWarning, match=r"logging to Failing failed \(OSError: disk full\) and is off") as caught:
        trained([failing, noted], moving())
    assert len([each for each in caught if "Failing" in str(each.message)]) == 1
    assert noted.steps(metric_names.LOSS) == [5, 10, 15]
    assert failing.steps("train_loss") == list(range(16))


class Breaks(Noted):
    """Takes some rows, then none."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good = good

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if len(self.rows) == self.good:
            raise OSError("disk full")
        super().log_metrics(metrics, step)


@pytest.mark.parametrize("good", [0, 1, 2, 8])
def test_a_failing_logger_does_not_end_a_training_that_logs_nothing_itself(good: int) -> None:
    failing, noted = Breaks(good), Noted()
    with pytest.warns(UserWarning, match=r"logging to Breaks failed \(OSError: disk full\) and is off") as caught:
        trainer = trained([failing, noted], moving(), Plain())
    assert len([each for each in caught if "Breaks" in str(each.message)]) == 1
    assert trainer.global_step == 16
    assert len(failing.rows) == good
    assert noted.steps(metric_names.BITS) == list(range(16))


def test_rows_of_a_module_that_logs_nothing_are_those_of_one_that_does() -> None:
    def rows(module: Any, **options: Any) -> tuple[list[Any], set[str], set[str]]:
        logger = Noted()
        trainer = trained(logger, moving(), module, **options)
        of_steps = [(step, set(row) - {"train_loss"}) for step, row in logger.rows if metric_names.BITS in row]
        return of_steps, set(trainer.logged_metrics), set(trainer.callback_metrics)

    for options in ({}, {"log_every_n_steps": 3}, {"accumulate_grad_batches": 2}, {"log_every_n_steps": 0}):
        theirs, own = rows(Logs(), **options), rows(Plain(), **options)
        assert theirs[0] == own[0]
        assert theirs[1] - {"train_loss", "epoch"} == own[1] - {"epoch"}
        assert theirs[2] - {"train_loss"} == own[2]


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_run_that_breaks_leaves_its_tables(tmp_path: Path, error: BaseException) -> None:
    class Break(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                raise error

    logger = CSVLogger(tmp_path)
    trainer = quiet(logger=logger, callbacks=[moving(), Break()], max_epochs=1)
    with pytest.raises(type(error) if isinstance(error, Exception) else SystemExit):
        trainer.fit(Logs(), loader())
    document = json.loads(Path(logger.log_dir, "autoprec.json").read_text())
    assert document["ended"] == ("failed" if isinstance(error, Exception) else "interrupted")
    assert [entry["applied"] for entry in document["history"] if entry["knob"] == "precision"] == ["bf16"]


# tables


def info(knobs: tuple[str, ...] = ("precision",), **formats: str) -> RunInfo:
    units = [UnitInfo(name=name, kind="linear", parameter_count=10 + 10 * place) for place, name in enumerate(formats)]
    left = UnitInfo(name="odd", kind="lstm", parameter_count=1000, left_alone="not steered")
    return RunInfo(
        model="M",
        started_at="",
        command="train.py --key SECRET",
        versions={},
        device="",
        device_type="cpu",
        machine={},
        policy="rule",
        interval=5,
        knobs=knobs,
        masked={},
        settings={"cap": math.inf},
        base_precision="32-true",
        units=(*units, left),
        formats={**formats, "odd": "fp32"},
        parameter_count=1030,
        window=100,
    )


def test_format_map_keeps_stretches_of_any_origin() -> None:
    found = FormatMap(info(a="fp32", b="fp32"))
    change = {"knob": "precision", "requested": "bf16", "outcome": "applied"}
    found.note_decisions(
        [
            Decision.from_dict({**NOTHING, **change, "step": 100, "unit": "b", "before": "fp32", "applied": "bf16"}),
            Decision.from_dict({**NOTHING, **change, "step": 104, "unit": "a", "before": "fp32", "applied": "bf16"}),
            Decision.from_dict({**NOTHING, "step": 105, "knob": "clip", "applied": 1.0, "outcome": "applied"}),
        ]
    )
    found.note({"a": "fp32", "b": "bf16", "odd": "fp32"}, 110)
    assert [dict(zip(FORMAT_COLUMNS, row, strict=True)) for row in found.rows(120)] == [
        {**UNIT_A, "format": "fp32", "bits": 32, "from_window": 100, "to_window": 104},
        {**UNIT_A, "format": "bf16", "bits": 16, "from_window": 104, "to_window": 110},
        {**UNIT_A, "format": "fp32", "bits": 32, "from_window": 110, "to_window": 120},
        {**UNIT_A, "unit": "b", "parameters": 20, "format": "bf16", "bits": 16, "from_window": 100, "to_window": 120},
    ]
    assert found.shares() == pytest.approx(
        {
            "autoprec/parameter_share/fp32": 1 / 3,
            "autoprec/unit_share/fp32": 1 / 2,
            "autoprec/parameter_share/bf16": 2 / 3,
            "autoprec/unit_share/bf16": 1 / 2,
        }
    )


def test_a_run_whose_precision_is_not_steered_has_no_map() -> None:
    found = FormatMap(info((), a="fp32"))
    found.note({"a": "bf16", "odd": "bf16"}, 101)
    assert (found.shares(), found.rows(120)) == ({}, [])
    logger = Noted()
    trained(logger, AutoPrecisionCallback(knobs=(), interval=4, verbose=False), precision="bf16-mixed")
    assert logger.steps(metric_names.LOSS) == [5, 10, 15]
    assert not any("_share/" in name for _, row in logger.rows for name in row)


NOTHING = {"unit": None, "before": None, "requested": None, "applied": None, "reason": "", "recovered_at": None}
UNIT_A = {"unit": "a", "kind": "linear", "parameters": 10}


def test_numbers_that_are_not_finite_are_not_logged() -> None:
    reading = ProgressReading(window=1, global_step=1, epoch=0, elapsed_s=1.0, loss=math.nan, step_ms=math.inf)
    assert reading_metrics(reading) == {metric_names.ELAPSED_S: 1.0}


def test_settings_hold_no_command_and_nothing_that_json_has_not() -> None:
    from autoprec.run_tables import settings_of

    text = json.dumps(settings_of(info(a="fp32")), allow_nan=False)
    assert "SECRET" not in text
    assert json.loads(text)["settings"] == {"cap": "inf"}
    assert json.loads(text)["units"] == 2


def test_tables_hold_text_that_markdown_would_take_for_its_own() -> None:
    row = history_rows([Decision(3, "precision", "a", "fp32", "bf16", "fp32", "refused", "a | b\nc")])
    assert markdown(["x"], [[cell] for cell in row[0]]).splitlines()[-2] == "| a \\| b c |"


# docs


@pytest.mark.parametrize("place", ["AT_LOG_STEPS", "AT_DECISIONS", "AT_END"])
def test_docs_have_every_metric_with_its_meaning(place: str) -> None:
    page = (DOCS / "loggers.md").read_text()
    for name, meaning in getattr(metric_names, place).items():
        assert f"| `{name}` | {meaning} |" in page

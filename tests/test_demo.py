"""The demo's parts one by one, and its harness with arms that are known to be equal, slow or broken.

Time budget: 60 s (about eight processes forked from one server).
"""

from __future__ import annotations

import importlib
import io
import json
import math
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from autoprec import machine
from autoprec.compare.messages import Done, Go, Ready, Turn
from autoprec.compare.turns import RunError
from autoprec.demo import data
from autoprec.demo.models import ByteGPT, DigitsCNN
from autoprec.demo.picture import draw, merged_rows, smooth
from autoprec.demo.record import write_json
from autoprec.demo.results import (
    LossDifference,
    RunResult,
    loss_difference,
    loss_verdict,
    pairs_of,
    step_ratio,
    time_verdict,
    whole_ratio,
)
from autoprec.demo.run import DemoSettings, beginning, conditions, show_progress
from autoprec.demo.summary import TaskSummary, last_line, plain_words, summarise
from autoprec.demo.table import build_table
from autoprec.demo.tasks import ARMS, AUTOPREC, BASELINE, Arm, Material, Task, cnn_task, gpt_task
from autoprec.demo.turns import open_task, run_in_turns
from autoprec.paired import Spread

pytest.importorskip("sklearn.datasets")  # sets environment variables when it is imported

LAST_LINE = re.compile(
    r"demo: gpt_step_ratio=(\d+\.\d{3}|nan) gpt_loss_diff=-?\d+\.\d{4}"
    r" cnn_step_ratio=(\d+\.\d{3}|nan) cnn_loss_diff=-?\d+\.\d{4} skipped=\d+ seconds=\d+"
)


# data


def write_library(root: Path, files: int) -> None:
    for index in range(files):
        path = root / ("package" if index % 2 else ".") / f"module_{index:03}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"value = {index}\n" * (index + 1))


def test_source_split_is_repeatable_and_disjoint(tmp_path: Path) -> None:
    write_library(tmp_path, 60)
    first, second = data.load_source(tmp_path), data.load_source(tmp_path)
    assert torch.equal(first.train[0], second.train[0])
    assert torch.equal(first.held_out[0], second.held_out[0])
    train, held_out = (bytes(part[0].tolist()).decode() for part in (first.train, first.held_out))
    train_values, held_out_values = (set(re.findall(r"= (\d+)", text)) for text in (train, held_out))
    assert held_out_values
    assert train_values.isdisjoint(held_out_values)
    assert len(train_values | held_out_values) == 60


def test_source_leaves_out_packages_tests_and_duplicates(tmp_path: Path) -> None:
    write_library(tmp_path, 30)
    total = sum(len(part[0]) for part in (data.load_source(tmp_path).train, data.load_source(tmp_path).held_out))
    for folder in ("site-packages", "test", "encodings"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other.py").write_text("x = 'not wanted'\n")
    (tmp_path / "copy.py").write_bytes((tmp_path / "module_004.py").read_bytes())
    split = data.load_source(tmp_path)
    assert len(split.train[0]) + len(split.held_out[0]) == total


def test_source_stays_below_the_limit(tmp_path: Path) -> None:
    write_library(tmp_path, 60)
    split = data.load_source(tmp_path, limit=5000)
    assert 4000 < len(split.train[0]) + len(split.held_out[0]) <= 5000


def test_source_missing_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"Found 0 `.py` files of the Python standard library below `{tmp_path}`")
    ):
        data.load_source(tmp_path)


def test_digits_split_is_disjoint_and_scaled() -> None:
    split = data.load_digits()
    images, labels = split.train
    assert images.shape == (1437, 1, 8, 8)
    assert split.held_out[0].shape == (360, 1, 8, 8)
    assert labels.dtype == torch.int64
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    rows = {row.numpy().tobytes() for row in images}
    assert not any(row.numpy().tobytes() in rows for row in split.held_out[0])


def test_order_depends_on_the_seed_only() -> None:
    assert torch.equal(data.random_offsets(1000, 10, 50, seed=3), data.random_offsets(1000, 10, 50, seed=3))
    assert not torch.equal(data.random_offsets(1000, 10, 50, seed=3), data.random_offsets(1000, 10, 50, seed=4))
    order = data.shuffled_passes(7, 16, seed=0)
    assert sorted(order[:7].tolist()) == sorted(order[7:14].tolist()) == list(range(7))
    assert data.random_offsets(10, 10, 5, seed=0).tolist() == [0] * 5


# models


def test_sizes() -> None:
    assert 10e6 < sum(parameter.numel() for parameter in ByteGPT().parameters()) < 11.5e6
    assert 5e4 < sum(parameter.numel() for parameter in DigitsCNN().parameters()) < 2e5


def test_gpt_does_not_look_ahead() -> None:
    model = ByteGPT(width=32, layers=2, heads=2, context=16)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1
    before, after = model(tokens), model(changed % 256)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


# results


def result(arm: str, seed: int, rounds: list[list[float]], loss: float = 1.0, task: str = "cnn") -> RunResult:
    run = RunResult(task, arm, seed, "bf16 autocast", parameters=1000)
    for turn in rounds:
        run.add_turn(Turn(turn, [loss] * len(turn)))
        run.add_point(loss)
    run.done = Done(peak_bytes=2**28, applied_steps=run.steps)
    return run


def test_ratio_is_taken_round_by_round_without_the_warmup() -> None:
    # the machine slows down threefold in the third round, and both arms with it; the first round is warm-up
    runs = [
        result(BASELINE, 0, [[9.0, 9.0], [1.0, 1.0], [3.0, 3.0], *[[1.0, 1.0]] * 3]),
        result(AUTOPREC, 0, [[0.1, 0.1], [1.5, 1.5], [4.5, 4.5], *[[1.5, 1.5]] * 3]),
    ]
    assert step_ratio(runs, AUTOPREC, BASELINE, warmup=2) == Spread(1.5, 1.5, 1.5, 5)


def test_whole_ratio_holds_what_the_other_leaves_out() -> None:
    turns = [[1.0, 1.0]] * 5
    runs = [result(BASELINE, seed, [[1.0, 1.0], *turns]) for seed in range(3)]
    runs += [result(AUTOPREC, seed, [[6.0, 2.0], *turns]) for seed in range(2)]  # slow at the start, then equal
    assert step_ratio(runs, AUTOPREC, BASELINE, warmup=2).median == 1.0
    assert whole_ratio(pairs_of(runs, AUTOPREC, BASELINE), warmup=2) == 18 / 12


@pytest.mark.parametrize(("rounds", "is_number"), [(0, False), (4, False), (5, True)])
def test_ratios_of_few_rounds_are_not_numbers(rounds: int, is_number: bool) -> None:
    turns = [[1.0, 1.0]] * (1 + rounds)
    # three seeds do not make up for rounds
    runs = [result(arm, seed, turns) for arm in (BASELINE, AUTOPREC) for seed in range(3)]
    assert math.isfinite(step_ratio(runs, AUTOPREC, BASELINE, warmup=2).median) is is_number
    assert math.isfinite(whole_ratio(pairs_of(runs, AUTOPREC, BASELINE), warmup=2)) is is_number


def test_the_loss_at_the_end_is_the_last_point_of_the_curve() -> None:
    run = result(BASELINE, 0, [[1.0], [1.0]], 0.3)
    assert (run.final_loss, run.points[-1]) == (0.3, (2, 2.0, 0.3))


@pytest.mark.parametrize(
    ("ratio", "repeat", "expected"),
    [
        (Spread(0.80, 0.78, 0.83, 20), 1.01, "faster"),
        (Spread(1.30, 1.25, 1.33, 20), 1.01, "slower"),
        (Spread(1.04, 1.03, 1.05, 20), 1.00, "no difference"),  # within 5 %
        (Spread(1.30, 0.95, 1.60, 20), 1.01, "no difference"),  # the quartiles hold 1
        (Spread(1.10, 1.08, 1.12, 20), 0.88, "no difference"),  # the baseline differs from itself by more
        (Spread(1.30, 1.25, 1.33, 4), 1.01, "too few rounds"),
        (Spread(math.nan, math.nan, math.nan, 0), 1.0, "too few rounds"),
    ],
)
def test_time_verdict(ratio: Spread, repeat: float, expected: str) -> None:
    assert time_verdict(ratio, Spread(repeat, repeat, repeat, 20)) == expected


@pytest.mark.parametrize(
    ("steered", "spread", "expected"),
    [
        (0.9, 0.05, "better"),
        (1.1, 0.05, "worse"),
        (1.1, 0.2, "no difference"),
        (math.nan, 0.1, "not finite"),
        (1.1, math.nan, "worse"),
    ],
)
def test_loss_verdict(steered: float, spread: float, expected: str) -> None:
    assert loss_verdict(LossDifference(BASELINE, steered, 1.0, spread)) == expected


def test_loss_is_compared_with_the_best_static_arm_on_the_same_seeds() -> None:
    turns = [[1.0]]
    runs = [
        result("32-true", 0, turns, 1.0),
        result(BASELINE, 0, turns, 1.2),
        result(AUTOPREC, 0, turns, 1.1),
        result(BASELINE, 1, turns, 0.5),  # another seed: only for the spread
    ]
    difference = loss_difference(runs, AUTOPREC, BASELINE)
    assert difference.best_static == "32-true"
    assert difference.value == pytest.approx(0.1)
    assert difference.spread == pytest.approx(0.7)


def test_a_static_arm_that_diverged_is_not_the_best() -> None:
    runs = [result("32-true", 0, [[1.0]], math.nan), result(BASELINE, 0, [[1.0]], 1.2), result(AUTOPREC, 0, [[1.0]])]
    assert loss_difference(runs, AUTOPREC, BASELINE).best_static == BASELINE


def test_shares_of_formats_are_of_parameters() -> None:
    run = result(AUTOPREC, 0, [[1.0]])
    run.add_turn(Turn([1.0], [1.0], [(0, {"a": "fp32", "b": "fp32"}), (1, {"a": "fp32", "b": "bf16"})]))
    run.done = Done(None, unit_parameters={"a": 100, "b": 900})
    assert run.format_shares() == pytest.approx({"bf16": 0.9, "fp32": 0.1})


# output


def three_arms(task: str, slower: float, rounds_made: int = 7) -> list[RunResult]:
    rounds = [[0.010, 0.011, 0.012]] * rounds_made
    runs = [result(arm, seed, rounds, 0.5 + seed / 100, task) for seed in range(3) for arm in ("32-true", BASELINE)]
    for seed in range(2):
        run = result(AUTOPREC, seed, [[step * slower for step in turn] for turn in rounds], 0.5, task)
        run.format_changes = [(0, {"net.0": "fp32", "net.1": "fp32"}), (6, {"net.0": "fp32", "net.1": "bf16"})]
        run.done = Done(2**28, 14, 1, {"net.0": 10, "net.1": 990}, {"applied": 1}, 1.0, 1.0)
        runs.append(run)
    return runs


def summary_of(task: str, slower: float, rounds_made: int = 7) -> TaskSummary:
    plan = Task(task, DigitsCNN, data.Split((), (), "made up"), _no_material, (), 21, 1, 3, warmup=3)
    return summarise(plan, three_arms(task, slower, rounds_made))


def _no_material(split: data.Split, samples: int, seed: int) -> Material:
    raise AssertionError


def test_table_fits_into_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(build_table([summary_of("gpt", 1.5), summary_of("cnn", 0.5)]))
    text = console.export_text()
    assert "…" not in text
    assert re.search(r"bf16-mixed +1\.00 +1\.00 +0\.5200 .*\n +seed 2 ", text)
    assert re.search(r"autoprec +1\.50 +1\.50 +0\.5000 +2 +256 +bf16 99\.0%", text)
    assert "fp32 1.0%" in text


def test_words_follow_the_numbers() -> None:
    words = "\n".join(plain_words(summary_of("gpt", 1.5)))
    assert "  Time: autoprec is slower than bf16-mixed. After the first 3 steps a step takes 1.50 times" in words
    assert "  Whole run: all 21 steps together, the first 3 included, take 1.50 times" in words
    words = "\n".join(plain_words(summary_of("cnn", 0.5)))
    assert "  Time: autoprec is faster than bf16-mixed. After the first 3 steps a step takes 0.50 times" in words
    assert "no difference beyond what another seed makes" in words
    assert "Skipped: 2 optimizer steps" in words
    assert "no difference between autoprec and bf16-mixed" in "\n".join(plain_words(summary_of("cnn", 1.0)))


def test_too_few_rounds_give_no_number_anywhere() -> None:
    summary = summary_of("gpt", 1.5, rounds_made=3)
    words = "\n".join(plain_words(summary))
    assert "  Time: n/a. Rounds after the first 3 steps: 2; of fewer than 5 no ratio is made. More `--minutes`" in words
    assert "  Whole run: n/a" in words
    assert "times as long" not in words
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(build_table([summary]))
    assert re.search(r"autoprec +n/a +n/a +0\.5000 ", console.export_text())
    line = last_line([summary, summary_of("cnn", 0.5)], 1.0)
    assert LAST_LINE.fullmatch(line)
    assert line.startswith("demo: gpt_step_ratio=nan ")


def test_conditions_name_what_is_unusual() -> None:
    text = " ".join(conditions(DemoSettings(threads=3), warmup=10))
    for part in (
        "threads: 3",
        "AutoPrecisionCallback(interval=10): runs are short",
        "The first 10 steps are left out",
        "those 10 and autoprec's trial of new formats included",
        "gradient_clip_val=1, which the callback leaves alone",
    ):
        assert part in text, part


def test_the_beginning_says_what_is_done_in_any_case() -> None:
    text = beginning((gpt_task(), cnn_task()), 1.0, quick=False)
    assert "no new round after 1 minutes" in text
    assert "15 steps of each gpt run and 30 steps of each cnn run; on 2 cores that took 80 to 150 s." in text
    assert "that took" not in beginning((gpt_task(quick=True),), 1.0, quick=True)  # that was measured with other models


def test_progress_is_shown_from_the_first_turn_where_there_is_no_terminal() -> None:
    text, task = io.StringIO(), cnn_task()
    run = result(AUTOPREC, 0, [[1.0]])
    with show_progress(Console(file=text, width=120), task) as on_turn:
        begun = text.getvalue()
        on_turn(run)
        first = text.getvalue()
        on_turn(run)
    assert "cnn: 9 runs of 200 steps" in begun
    assert "cnn: starting a process for each run" in begun
    assert first[len(begun) :].startswith("cnn: autoprec   seed 0  loss 1.000  0% of all steps")
    assert text.getvalue() == first  # the next line comes with the next tenth


def test_the_command_is_named_as_it_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/autoprec/__main__.py", "demo", "--threads", "3"])
    assert machine.circumstances(3)["command"] == "python -m autoprec demo --threads 3"
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/autoprec", "demo"])
    assert machine.circumstances(3)["command"] == "autoprec demo"


def test_last_line() -> None:
    line = last_line([summary_of("gpt", 1.5), summary_of("cnn", 0.5)], 301.4)
    assert LAST_LINE.fullmatch(line)
    assert line.startswith("demo: gpt_step_ratio=1.500 ")
    assert line.endswith(" skipped=4 seconds=301")


def test_json_and_picture(tmp_path: Path) -> None:
    runs = three_arms("gpt", 1.5) + three_arms("cnn", 0.5)
    runs[0].losses[3] = math.nan
    write_json(tmp_path / "demo.json", {"threads": 2}, [summary_of("gpt", 1.5)], runs, 5.0)
    document = json.loads((tmp_path / "demo.json").read_text())
    assert document["tasks"][0]["step_ratio"] == pytest.approx(1.5)
    assert document["tasks"][0]["whole_run_ratio"] == pytest.approx(1.5)
    assert document["tasks"][0]["rows"][0]["whole_ratio"] == pytest.approx(1.0)
    assert document["runs"][0]["final_loss"] == document["runs"][0]["points"][-1]["loss"]
    assert document["runs"][0]["losses"][3] is None
    assert document["runs"][6]["format_changes"][1] == {"step": 6, "formats": {"net.0": "fp32", "net.1": "bf16"}}
    draw(runs, tmp_path / "demo.png", "made up", 3)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_units_that_went_the_same_way_share_a_row() -> None:
    low, high = ("fp32", "bf16"), ("fp32", "fp32")
    histories = {f"blocks.{index}.qkv": low for index in range(4)} | {"blocks.6.qkv": low, "blocks.7.qkv": high}
    histories |= {"blocks.0.norm": high, "head": low, "a.0.b.1": low, "a.0.b.2": low}
    assert merged_rows(histories) == {
        "blocks.0-3,6.qkv": low,
        "blocks.7.qkv": high,
        "blocks.0.norm": high,
        "head": low,
        "a.0.b.1": low,
        "a.0.b.2": low,
    }


def test_training_losses_are_smoothed_over_ten_steps() -> None:
    assert smooth([float(value) for value in range(12)])[-3:] == [4.5, 5.5, 6.5]


@pytest.mark.parametrize("values", [{"minutes": 0.0}, {"minutes": math.nan}, {"threads": 0}])
def test_bad_settings(values: dict[str, float]) -> None:
    (name, value), *_ = values.items()
    with pytest.raises(ValueError, match=re.escape(f"Passed `{name}={value!r}`")):
        DemoSettings(**values)  # type: ignore[arg-type]


# harness

Arms = Callable[[str, str], tuple[Arm, Arm]]


@pytest.fixture
def make_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arms:
    """Makes a plain arm, and one with a callback that does something else besides, in the given hook."""

    def make(hook: str, statement: str) -> tuple[Arm, Arm]:
        # the runs' processes must be able to import it
        (tmp_path / "intruder.py").write_text(
            "import os, time\n"
            "from lightning.pytorch.callbacks import LambdaCallback\n\n"
            f"def intrude(*_):\n    {statement}\n\n"
            f"def callbacks():\n    return [LambdaCallback({hook}=intrude)]\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "intruder", raising=False)
        callbacks = importlib.import_module("intruder").callbacks
        return replace(ARMS[0], name=BASELINE), replace(ARMS[0], name=AUTOPREC, callbacks=callbacks)

    return make


def run_quick(arms: tuple[Arm, ...], folder: Path, deadline_s: float = 1e6, steps: int = 9) -> list[RunResult]:
    task = cnn_task(arms, quick=True)
    task = replace(task, runs=tuple((arm, 0) for arm in arms), steps=steps)
    return run_in_turns(task, 1, folder, time.monotonic() + deadline_s, lambda run: None)


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_arm_that_sleeps_shows_up_as_slower_and_nothing_else_differs(make_arms: Arms, tmp_path: Path) -> None:
    arms = make_arms("on_train_batch_end", "time.sleep(0.2)")
    plain, sleepy = run_quick(arms, tmp_path, steps=18)
    ratio = step_ratio([plain, sleepy], AUTOPREC, BASELINE, warmup=3)
    assert time_verdict(ratio, Spread(1.0, 1.0, 1.0, 20)) == "slower"
    assert all(second >= 0.2 for second in sleepy.step_seconds(0))
    # waiting for the sleeper is not charged to the other arm
    assert plain.seconds < sleepy.seconds / 2
    # same seed, same weights, same order of samples
    assert plain.losses == sleepy.losses
    assert plain.final_loss == sleepy.final_loss
    assert [step for step, _, _ in plain.points] == [0, 9, 18]
    assert plain.final_loss == plain.points[-1][2]
    assert plain.done.applied_steps == 18
    assert plain.done.peak_bytes is None or plain.done.peak_bytes > 2**26


def test_time_before_the_step_counts_too(make_arms: Arms, tmp_path: Path) -> None:
    _, sleepy = run_quick(make_arms("on_train_batch_start", "time.sleep(0.2)"), tmp_path, steps=3)
    assert all(second >= 0.2 for second in sleepy.step_seconds(0))


def test_all_runs_stop_at_the_same_step_when_time_is_up(make_arms: Arms, tmp_path: Path) -> None:
    runs = run_quick(make_arms("on_train_end", "pass"), tmp_path, deadline_s=0.0, steps=30)
    assert [run.steps for run in runs] == [9, 9]
    assert all(math.isfinite(run.final_loss) for run in runs)


def test_a_run_that_raises_ends_the_job_with_its_error(make_arms: Arms, tmp_path: Path) -> None:
    arms = make_arms("on_train_batch_end", "raise ZeroDivisionError('the arm broke')")
    with pytest.raises(RunError, match=r"The run cnn/autoprec/seed 0 failed(.|\n)*ZeroDivisionError: the arm broke"):
        run_quick(arms, tmp_path)
    assert not multiprocessing.active_children()


def test_a_run_that_vanishes_ends_the_job(make_arms: Arms, tmp_path: Path) -> None:
    arms = make_arms("on_train_batch_end", "print('last words', flush=True); os._exit(7)")
    with pytest.raises(RunError, match="The run cnn/autoprec/seed 0 is gone: its process ended with exit code 7"):
        run_quick(arms, tmp_path)
    assert not multiprocessing.active_children()
    assert "last words" in (tmp_path / "cnn-autoprec-0.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_waiting_run_uses_no_processor_time(tmp_path: Path) -> None:
    task = replace(cnn_task(ARMS[:1], quick=True), runs=((ARMS[0], 0),))
    with open_task(task, 2, tmp_path) as (worker,):
        worker.receive(Ready)
        worker.ask(Go(3, False), Turn)
        time.sleep(0.1)
        (process,) = multiprocessing.active_children()
        assert process.pid is not None
        before = processor_seconds(process.pid)
        time.sleep(1.0)
        assert processor_seconds(process.pid) - before < 0.1


def test_tasks_have_the_promised_runs() -> None:
    gpt, cnn = gpt_task(), cnn_task()
    assert [(arm.name, seed) for arm, seed in gpt.runs] == [
        ("32-true", 0),
        (BASELINE, 0),
        (AUTOPREC, 0),
        (BASELINE, 1),
    ]
    assert len(cnn.runs) == 9
    first, second = (gpt.material(gpt.split, 8, 0).train[3][0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == (129,)

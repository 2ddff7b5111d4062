"""The whole-step benchmark: what takes turns, what is compared, what is resumed and what is printed. No times.

Time budget: 25 s.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoprec.json_files import read_json, write_json
from benchmarks import docs, overhead, store, train
from benchmarks.arms import ARMS, Arm
from benchmarks.bare import HAND, measure_bare
from benchmarks.figures import Findings, RowTimes, last_line, ratio
from benchmarks.fits import Fit, measure_fits
from benchmarks.machine import bound_ms, measure_machine, memory_gbs, work_of
from benchmarks.ops import ROWS
from benchmarks.report import as_markdown, as_text, tables
from benchmarks.setups import in_setups
from benchmarks.store import Job
from benchmarks.targets import TARGETS, Target, judge
from benchmarks.turns import Lap, Run
from benchmarks.workloads import GPT, MEMORY_ROWS, MLP, WORKLOADS, Workload

TINY = Workload("mlp-8-4", lambda make: MLP(make, 8), lambda: torch.randn(4, 64), 10, 2)
TINY_GPT = Workload(
    "gpt-1-64", lambda make: GPT(make, 1, 64, 8, 16), lambda: torch.randint(16, (2, 8)), 16, 1, per_token=True
)
LAST_LINE = re.compile(
    r"bench: mlp_geomean_vs_amp_clip=(\S+) geomean_vs_amp_clip=(\S+) geomean_vs_amp_fused=(\S+)"
    r" worst_vs_amp_fused=(\S+) worst_vs_best_static=(\S+) grad_stats_vs_clip=(\S+) fused_step_vs_torch=(\S+)"
    r" rss_ratio=(\S+)"
)


def step_result(row: str, kind: str = "trainer", **ms: float) -> dict[str, Any]:
    """A result whose arms take ``ms`` on the thread's clock and ten times that on the wall, in three rounds."""
    job = dataclasses.asdict(Job(kind, row))
    laps = {arm: [[value / 1e3, value / 1e2, value / 1e3]] * 3 for arm, value in ms.items()}
    return {"job": job, "laps": laps, "grad_stats": {"fp32": [[1e-5, 1e-4, 1e-5]] * 3}, "work": work_of(TINY)}


MACHINE = {
    "bf16_gflops": 100.0,
    "int8_gops": 200.0,
    "read_gbs": {"1": 100.0, "16": 20.0, "256": 10.0},
    "copy_gbs": {"1": 90.0, "16": 30.0, "256": 8.0},
    "loop_ms": 0.5,
}


def whole_run() -> list[dict[str, Any]]:
    """Results of every job that the last line needs: ours takes 2 ms, the best static arm 1.9."""
    found = [{"job": dataclasses.asdict(Job("machine", "peaks")), **MACHINE}]
    measured = {"fp32": 4.0, "ours_measured": 1.9 / 1.2, "fp32_measured": 3.6}
    steps = {"amp_clip": 3.0, "amp_fused": 1.9, "amp_kernel": 1.0, "ours": 2.0, **measured}
    found += [step_result(row, kind="trainer", **steps) for row in WORKLOADS]
    for kind, values in (
        ("grad_stats", {"MB": 1.0, "clip us": 100.0, "fp32 us": 50.0, "fp32 vs clip": 0.5}),
        ("step", {"M": 1.0, "torch ms": 9.0, "bf16 grads": 2.5, "bare AdamW": 1.1}),
    ):
        rows = [{"table": kind, "row": name, **values} for name in ROWS]
        found.append({"job": dataclasses.asdict(Job(kind, "models")), "rows": rows})
    for row in MEMORY_ROWS:
        for arm, peak in (("amp_clip", 100), ("ours", 60)):
            job = dataclasses.asdict(Job("memory", row, arms=(arm,)))
            found.append({"job": {**job, "arms": [arm]}, "before_bytes": 1, "over_bytes": peak * 1_000_000})
    return found


# ---- turns ----


def test_runs_take_turns_and_step_only_in_their_own() -> None:
    seen: list[str] = []

    def body(run: Run) -> None:
        for _ in range(6):
            run.arrive()
            seen.append(run.name)

    runs = [Run(name, body) for name in "ab"]
    for run in runs:
        run.start()
    assert seen == []
    for run in (*runs, *reversed(runs)):
        lap = run.take(2)
        assert len(lap) == 3
        assert min(lap) >= 0
    assert "".join(seen) == "aabbbbaa"
    for run in runs:
        run.finish()
    assert "".join(seen) == "aabbbbaaaabb"


def test_what_one_run_changes_in_the_process_is_hidden_from_the_others() -> None:
    found: dict[str, list[Any]] = {"a": [], "b": []}

    def body(run: Run) -> None:
        handle = register_optimizer_step_pre_hook(lambda *args: found[run.name].append("hook"))
        torch.set_float32_matmul_precision({"a": "medium", "b": "highest"}[run.name])
        weight = nn.Parameter(torch.zeros(1))
        for _ in range(2):
            run.arrive()
            torch.optim.SGD([weight], lr=0.1).step()
            found[run.name].append(torch.get_float32_matmul_precision())
        handle.remove()

    runs = [Run(name, body) for name in "ab"]
    for run in runs:
        run.start()
    assert torch.get_float32_matmul_precision() == "highest"
    for run in runs:
        run.take(1)
    assert found == {"a": ["hook", "medium"], "b": ["hook", "highest"]}
    for run in runs:
        run.finish()
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_run_has_the_threads_of_the_process() -> None:
    found: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = Run("a", lambda run: found.append(torch.get_num_threads()) or run.arrive())  # type: ignore[func-returns-value]
        run.start()
        run.finish()
    finally:
        torch.set_num_threads(before)
    assert found == [2]


def test_a_failing_arm_ends_the_row_and_no_thread_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: MLP, inputs: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no more")

    before = threading.active_count()
    monkeypatch.setattr(MLP, "forward", fail)
    with pytest.raises(ArithmeticError, match="no more"):
        measure_fits(TINY, [ARMS["fp32"], ARMS["amp_fused"]], rounds=1, steps=1)
    assert threading.active_count() == before


# ---- what is compared ----


@pytest.fixture(scope="module")
def tiny_fits() -> dict[str, Any]:
    arms = [arm for arm in ARMS.values() if arm.is_for(TINY)]
    return measure_fits(TINY, arms, rounds=2, steps=2)


def test_every_arm_has_a_lap_for_each_round(tiny_fits: dict[str, Any]) -> None:
    assert set(tiny_fits["laps"]) == set(ARMS) - {"ours_int8"}
    assert {len(laps) for laps in (*tiny_fits["laps"].values(), *tiny_fits["grad_stats"].values())} == {2}
    assert set(tiny_fits["formats"]) == {name for name, arm in ARMS.items() if arm.callback} - {"ours_int8"}
    assert set(tiny_fits["formats"]["ours"].values()) == {"bf16"}


def test_an_arm_decides_before_its_rounds_count() -> None:
    class Counting(Callback):
        steps = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.steps += 1

    counting, seen = Counting(), list[int]()
    arm = Arm("counting", "", "32-true", callback=lambda _: counting, decides=True)
    measure_fits(TINY, [arm], 2, 2, on_round=lambda _: seen.append(counting.steps))
    # the next batch may be there before the last step has ended
    assert seen[0] in (arm.warm_steps(TINY) - 1, arm.warm_steps(TINY))
    assert np.diff(seen).tolist() == [2, 2]


@pytest.mark.parametrize("name", ["ours_default", "ours_measured", "fp32_measured"])
def test_arms_that_decide_have_decided(name: str) -> None:
    for workload in WORKLOADS.values():
        callback = ARMS[name].trainer_options(workload)["callbacks"][0]
        assert callback.interval < ARMS[name].warm_steps(workload)
        assert callback.interval <= max(5, workload.steps)


def test_arms_train_alike(tiny_fits: dict[str, Any]) -> None:
    losses = tiny_fits["final_loss"]
    start = Fit(TINY, ARMS["fp32"], TINY.make_batches(), 0).final_loss()
    for name in ("fp32_medium", "amp_clip", "amp_kernel", "ours"):
        # bf16 moves the loss by far less than these seven steps do
        assert abs(losses[name] - losses["fp32"]) < 0.1 * abs(losses["fp32"] - start), name


@pytest.mark.parametrize("workload", [TINY, TINY_GPT], ids=lambda workload: workload.name)
def test_loops_by_hand_train_alike(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: dict[int, list[float]] = {}
    step = type(workload.make_module(torch.optim.AdamW)).training_step

    def spy(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = step(self, batch, batch_idx)
        losses.setdefault(id(self), []).append(float(loss.detach()))
        return loss

    monkeypatch.setattr("benchmarks.workloads.Trained.training_step", spy)
    found = measure_bare(workload, list(ARMS.values()), rounds=3, steps=2)
    assert list(found["laps"]) == [name for name, arm in ARMS.items() if arm.callback is None] + [HAND]
    assert {len(laps) for laps in found["laps"].values()} == {3}
    curves = torch.tensor(list(losses.values()))
    assert curves.shape == (len(found["laps"]), 8)
    fallen = curves[:, 0] - curves[:, -1]  # the last batch is another, but all arms see the same
    assert (curves - curves[0]).abs().max() < 0.1 * max(fallen.abs().max(), torch.tensor(0.1))


def test_a_row_is_set_up_again_after_some_rounds() -> None:
    made: list[tuple[list[str], int]] = []

    def measure(arms: Sequence[Arm], rounds: int) -> dict[str, Any]:
        made.append(([arm.name for arm in arms], rounds))
        return {"laps": {arm.name: [len(made)] * rounds for arm in arms}, "final_loss": len(made)}

    arms = [ARMS["amp_clip"], ARMS["fp32"]]
    found = in_setups(measure, arms, 8)
    assert made == [(["amp_clip", "fp32"], 3), (["fp32", "amp_clip"], 3), (["amp_clip", "fp32"], 2)]
    rounds = [1, 1, 1, 2, 2, 2, 3, 3]
    assert found == {"laps": {"amp_clip": rounds, "fp32": rounds}, "final_loss": 1}


def test_rows_have_the_gradients_of_the_kernel_tables() -> None:
    for name, workload in WORKLOADS.items():
        with torch.device("meta"):
            shapes = [tuple(p.shape) for p in workload.model(torch.optim.AdamW).parameters()]
        kernel_row = "-".join(name.split("-")[:2]) if workload.family == "mlp" else name
        assert sorted(shapes) == sorted(ROWS[kernel_row]), name


def test_batches_and_weights_are_the_same_every_time() -> None:
    first, second = TINY.make_batches(), TINY.make_batches()
    pairs = zip(sum(first, ()), sum(second, ()), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    weights = [TINY.make_module(torch.optim.AdamW).state_dict() for _ in range(2)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_images_and_weights_of_the_cnn_are_channels_last() -> None:
    workload = WORKLOADS["cnn-32"]
    module = workload.make_module(torch.optim.AdamW)
    assert all(
        p.is_contiguous(memory_format=torch.channels_last)
        for p in module.parameters()
        if p.ndim == 4 and p.shape[1] > 3
    )
    images, _ = workload.make_batches()[0]
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_work_is_counted() -> None:
    weights = 64 * 8 + 8 * 8 + 8 * 8 + 8 * 10
    # forward, weight gradient, and an input gradient for all but the first layer; 4 samples
    assert work_of(TINY) == {"flops": 2 * 4 * (3 * weights - 64 * 8), "parameters": weights + 8 + 8 + 8 + 10}
    attention = 3 * 2 * 2 * 8 * 8 * 64  # batch 2, time 8, width 64: half of two products, three times
    linear = 3 * 2 * 16 * (64 * 64 * 12 + 64 * 16)
    assert work_of(TINY_GPT)["flops"] == attention + linear
    assert bound_ms({"flops": 1e9, "parameters": 1e6}, MACHINE) == pytest.approx(10 + 1.0)
    assert bound_ms({"flops": 3e9, "parameters": 1e6}, MACHINE, is_int8=True) == pytest.approx(10 + 20 / 2 + 1.0)


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.machine.SIZES_MB", (1, 2))
    found = measure_machine(threads=1, rounds=1)
    assert found.keys() == MACHINE.keys()
    assert found["read_gbs"].keys() == found["copy_gbs"].keys() == {"1", "2"}


def test_rates_of_memory_go_by_its_size() -> None:
    rates = [memory_gbs(MACHINE, size) for size in (0.1, 2.0, 16.0, 255.0, 1000.0)]
    assert rates == [100.0, 100.0, 30.0, 30.0, 10.0]
    assert memory_gbs(MACHINE, 16.0, ["read_gbs"]) == 20.0


# ---- figures ----


def test_ratios_are_taken_within_rounds() -> None:
    assert ratio([2.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == (2.0, 0.25)


def test_an_overhead_is_that_of_the_same_round() -> None:
    laps = {"plain": [Lap(1.0, 0.0, 0.0), Lap(2.0, 0.0, 0.0), Lap(4.0, 0.0, 0.0)]}
    laps["net"] = [
        Lap(lap.thread_s * factor, 9.0, 9.0) for lap, factor in zip(laps["plain"], (1.5, 1.1, 0.9), strict=True)
    ]
    assert overhead.overheads(laps) == {"net": pytest.approx(0.1)}


def test_arms_of_the_overhead_compute_in_float32_only() -> None:
    found = measure_fits(TINY, overhead.ARMS, rounds=1, steps=3)
    assert set(overhead.overheads(found["laps"])) == {"guard", "no copies", "net"}
    assert {name for formats in found["formats"].values() for name in formats.values()} == {"fp32"}
    losses = found["final_loss"].values()
    assert max(losses) == pytest.approx(min(losses), rel=1e-4)


def test_the_clock_goes_by_the_threads() -> None:
    result = step_result("mlp-128-64", ours=2.0)
    assert RowTimes(result).median_ms("ours") == pytest.approx(2.0)
    result["job"]["threads"] = 2
    assert RowTimes(result).median_ms("ours") == pytest.approx(20.0)


def test_last_line() -> None:
    match = LAST_LINE.fullmatch(last_line(Findings(whole_run()).figures()))
    assert match is not None
    assert match.groups() == ("1.50", "1.50", "0.95", "0.95", "0.95", "0.50", "2.50", "0.60")


def test_a_part_of_the_rows_has_no_mean() -> None:
    part = [result for result in whole_run() if result["job"]["row"] not in ("mlp-512-64", "gpt-6-512")]
    match = LAST_LINE.fullmatch(last_line(Findings(part).figures()))
    assert match is not None
    assert match.groups() == ("nan", "nan", "nan", "nan", "nan", "0.50", "2.50", "nan")


def test_a_control_is_not_the_best_static_arm() -> None:
    figures = Findings(whole_run()).figures()
    assert figures["vs_best_static", "cnn-32"] == pytest.approx(0.95)


def test_measured_choices_have_figures_of_their_own() -> None:
    figures = Findings(whole_run()).figures()
    assert figures["measured_vs_amp_clip", "geomean"] == pytest.approx(3.0 * 1.2 / 1.9)
    assert figures["measured_vs_best_static", "worst"] == pytest.approx(1.2)
    assert figures["fp32_measured_vs_fp32", "gpt-6-512"] == pytest.approx(4.0 / 3.6)


def test_targets_stand_beside_figures() -> None:
    verdicts = {(v.target.figure, v.row): v for v in judge(Findings(whole_run()))}
    assert {target.figure for target in TARGETS} - {figure for figure, _ in verdicts} == {
        "grad_stats_of_bandwidth",
        "int8_vs_ours",
    }
    assert verdicts["vs_amp_clip", "mlp-128-64"].is_met
    assert verdicts["rss_ratio", "gpt-6-512"].is_met
    missed = verdicts["vs_amp_clip", "mlp-2048-128"]
    assert not missed.is_met
    assert verdicts["vs_amp_fused", "worst"].bound == ""
    assert re.fullmatch(r"bound 0\.50 ms, amp_clip 3\.00 ms: \d\.\d\d at most", missed.bound)


def test_a_target_is_met_as_it_is_shown() -> None:
    assert Target("x", "y", 1.45).is_met(1.4451)
    assert not Target("x", "y", 1.45).is_met(1.444)
    assert Target("x", "y", 0.01, is_least=False).is_met(0.0104)
    assert not Target("x", "y", 0.01, is_least=False).is_met(0.011)


def test_losses_are_named() -> None:
    text = "\n".join(as_text(table) for table in tables(Findings(whole_run())))
    assert "Slower by more than 5%:\n  mlp-128-64 than amp_kernel 0.50" in text
    assert "MISSED" in text


def test_foreign_threads_are_named() -> None:
    result = step_result("mlp-128-64", ours=2.0)
    result["laps"]["ours"][1] = [1.0, 1.0, 1.5]
    text = "\n".join(as_text(table) for table in tables(Findings([result])))
    assert "Other threads took up to 50% of the processor time." in text


# ---- jobs ----


def test_options_of_a_quick_run() -> None:
    jobs = train.plan(train.parse(["--quick"]))
    assert {job.threads for job in jobs} == {1}
    assert [job.row for job in jobs if job.kind == "trainer"] == list(WORKLOADS)
    assert {job.kind for job in jobs} == {"machine", "trainer", "grad_stats", "step", "memory"}
    assert [job.arms for job in jobs if job.row == "gpt-6-512"][0] == tuple(ARMS)


def test_a_whole_run_has_both_threads_and_loops_and_default_malloc() -> None:
    jobs = train.plan(train.parse([]))
    for kind in ("trainer", "bare"):
        assert {(job.row, job.threads) for job in jobs if job.kind == kind} == {
            (r, t) for r in WORKLOADS for t in (1, 2)
        }
    assert {job.row for job in jobs if job.kind == "trainer" and job.malloc == "default"} == {"mlp-2048-128"}
    assert len([job for job in jobs if job.kind == "memory"]) == 2 * 2 * 5
    environments = [train.environment(job) for job in jobs if job.kind == "trainer"]
    assert {each["OMP_NUM_THREADS"] for each in environments} == {"1", "2"}


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--rows", "mlp-1-1"], ["--write-docs", "--threads", "1"]])
def test_bad_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.parse(arguments)
    assert "error" in capsys.readouterr().err


def test_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    interruptions = [KeyboardInterrupt()]

    def child(command: list[str], **options: Any) -> None:
        fields = json.loads(command[-2])
        if fields["row"] == "mlp-512-512" and interruptions:
            raise interruptions.pop()
        measured.append(fields["row"])
        laps = step_result(fields["row"], "trainer", **{str(arm): 1.0 for arm in fields["arms"]})
        write_json(Path(command[-1]), {**laps, "job": fields})

    monkeypatch.setattr(subprocess, "run", child)
    rows = ["mlp-128-64", "mlp-512-64", "mlp-512-512"]
    command = ["--only", "trainer", "--threads", "1", "--results", str(tmp_path), "--rows", *rows]
    with pytest.raises(SystemExit, match="goes on where it stopped"):
        train.main(command)
    train.main(command)
    assert measured == rows
    train.main([*command, "--fresh"])
    assert measured == rows * 2
    assert capsys.readouterr().out.count("done before") == 2
    summary = json.loads((tmp_path / "part.json").read_text())
    assert [result["job"]["row"] for result in summary["results"]] == rows
    assert {"command", "date", "circumstances", "figures", "targets", "last_line", "results"} == set(summary)
    assert {"figure": "vs_amp_clip", "row": "mlp-128-64", "value": 1.0} in summary["figures"]


def test_a_damaged_result_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert read_json(path) is None
    path.write_text('{"half')
    assert read_json(path) is None
    write_json(path, {"whole": 1})
    assert read_json(path) == {"whole": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_another_source_makes_results_due_again(tmp_path: Path) -> None:
    (tmp_path / "autoprec").mkdir()
    file = tmp_path / "autoprec" / "a.py"
    digests = []
    for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
        file.write_text(text)
        digests.append(store.source_digest(tmp_path))
    assert digests[0] == digests[2] != digests[1]
    jobs = [Job("trainer", "mlp-128-64", rounds=rounds) for rounds in (1, 2)]
    assert len({job.path(tmp_path) for job in jobs}) == 2


def test_docs_get_the_tables_of_a_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(docs.PAGE.read_text())
    for _ in range(2):  # the second time it replaces what the first has written
        docs.write_docs(Findings(whole_run()), "make bench", page)
    text = page.read_text()
    assert text.count("`bench: mlp_geomean_vs_amp_clip=1.50 ") == 1
    for table in tables(Findings(whole_run())):
        assert as_markdown(table) in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="It must have the lines `<!-- bench: begin -->`"):
        docs.write_docs(Findings(whole_run()), "make bench", page)


def test_jobs_in_processes_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--rows", "mlp-128-64", "--arms", "amp_clip", "ours", "--rounds", "2", "--steps", "1", "--threads", "1"]
    train.main([*options, "--only", "trainer", "--results", str(tmp_path)])
    out = capfd.readouterr().out.splitlines()
    assert out[0].startswith("[1/1] trainer mlp-128-64, 1 thread: |..")
    assert LAST_LINE.fullmatch(out[-1])
    (result,) = json.loads((tmp_path / "part.json").read_text())["results"]
    assert set(result) >= {"job", "load", "laps", "grad_stats", "final_loss", "formats", "work"}
    assert {arm: len(laps) for arm, laps in result["laps"].items()} == {"amp_clip": 2, "ours": 2}

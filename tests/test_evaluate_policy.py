"""The evaluation of policies: rivals, cells that go on where they were stopped, results, tables, card and command.

Time budget: 30 s.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoprec import cli
from autoprec.envs.engine import FORMATS
from autoprec.envs.proxies import Distribution, Task, draw_task
from autoprec.envs.twins import Twin
from autoprec.feature_rows import INDEX
from autoprec.rule import RuleController
from autoprec.table import TableSettings
from tests.kernels import needs_cpu_kernels

pytest.importorskip("stable_baselines3")
pytest.importorskip("gymnasium")
pytest.importorskip("scipy.stats")
from autoprec.policies import evaluate as evaluating
from autoprec.policies import evaluation_report as reporting
from autoprec.policies.evaluate import EvaluationSettings, Progress, evaluate
from autoprec.policies.evaluation_picture import draw
from autoprec.policies.evaluation_report import chosen_rivals
from autoprec.policies.evaluation_results import bank_results, strongest_table, summary_line
from autoprec.policies.evaluation_tables import interval, markdown, verdict
from autoprec.policies.model_card import model_card
from autoprec.policies.play import play_policy
from autoprec.policies.raising import Raises, count_raises
from autoprec.policies.rivals import policy_rival, rivals, table_settings
from autoprec.policies.rule_rival import RuleKnobs, RulePolicy
from autoprec.policies.task_groups import LEARNED, evaluation_tasks, groups
from tests.policy_evaluations import SMALL, drawn_tasks, made_up_results, made_up_trainings, small_policies

pytestmark = needs_cpu_kernels

NUMBER = r"(?:[+-]\d+\.\d{3}|nan)"
LAST_LINE = re.compile(
    rf"policy: tasks=\d+ seeds=\d+ vs_fp32_clip={NUMBER} vs_bf16_clip={NUMBER} vs_gradscaler_clip={NUMBER}"
    rf" vs_rule={NUMBER} vs_table_schedule={NUMBER} vs_table_schedule_low={NUMBER} learned_regimes_low={NUMBER}"
    r" raise_2=(?:\d\.\d\d|nan)"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    # one for all tests: twins depend on tasks alone
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "evaluation-cache"))


# ---- rivals ----


def test_rivals_have_names_of_their_own_and_play_to_the_end() -> None:
    tasks = evaluation_tasks("test", 3, distribution=SMALL)
    found = rivals(Path("no such file"))
    assert len({rival.name for rival in found}) == len(found)
    assert len({rival.digest() for rival in found}) == len(found)
    for rival in found:
        scores, recording = rival.play(tasks)
        assert recording is None
        assert np.isfinite(scores.score).all()
        again = rival.play(tasks)[0]
        np.testing.assert_array_equal(scores.score, again.score)  # the random one included


def test_tuned_settings_come_from_a_file_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"schedule": {"settings": {"clip": "inf", "schedule": [0.5], "batch": 1}}}))
    added = {rival.name: rival for rival in rivals(path)}.keys() - {rival.name for rival in rivals(tmp_path / "none")}
    assert added == {"table_schedule_tuned"}
    assert rivals(path)[-1].plays == TableSettings(clip=np.inf, schedule=(0.5,), batch=1)
    assert table_settings({"schedule": None}).schedule == ()
    with pytest.raises(ValueError, match=re.escape("Passed table settings with ['treshold']")):
        table_settings({"treshold": 0.1})


def test_a_folder_without_a_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no policy\.json and no policy\.safetensors"):
        policy_rival(tmp_path)


def test_a_policy_is_known_by_its_files_and_by_its_guard(tmp_path: Path) -> None:
    one, other = small_policies(tmp_path)
    digests = {policy_rival(one).digest(), policy_rival(other).digest(), policy_rival(one, guard=False).digest()}
    assert len(digests) == 3
    assert policy_rival(one).digest() == policy_rival(one).digest()


def test_the_rule_is_the_one_of_live_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = evaluation_tasks("test", 4, distribution=SMALL)
    seen: list[tuple[Any, Any]] = []
    decide = RuleController.decide

    def watched(self: RuleController, rows: Any) -> Any:
        moves = decide(self, rows)
        seen.append((rows, moves))
        return moves

    monkeypatch.setattr(RuleController, "decide", watched)
    recording = play_policy(tasks, RulePolicy(RuleKnobs(schedule=(0.5,))), mode="ladder", record=True)[1]
    played = recording.is_played
    assert len(seen) == played.sum()  # one decision for each run that still has budget
    assert any((moves == -1).any() for _, moves in seen)
    for rows, _ in seen:
        units = rows[rows[:, INDEX["knob_precision"]] == 1.0]
        dearer = (units[:, INDEX["cost_known"]] == 1.0) & (units[:, INDEX["cost_lower"]] >= 0.0)
        assert (units[dearer, INDEX["can_lower"]] == 0.0).all()  # what does not pay is masked
    ran = recording.formats[recording.level >= 0]
    assert not np.isin(ran, [FORMATS.index(name) for name in ("fp4", "int4")]).any()
    late = played & (recording.share >= 0.5)
    assert (recording.batch[late] == recording.batch[0, 0] + 1).all()


# ---- tasks and groups ----


def test_tasks_that_count_are_the_first_usable_ones() -> None:
    few, more = evaluation_tasks("test", 4), evaluation_tasks("test", 7)
    assert [task.seed for task, _ in few] == [task.seed for task, _ in more[:4]]
    assert all(twin.is_usable for _, twin in more)
    only = evaluation_tasks("only-cnn", 3)
    assert {task.architecture for task, _ in only} == {"cnn"}
    with pytest.raises(ValueError, match="Passed the bank 'tests'"):
        evaluation_tasks("tests", 3)


def test_groups_part_the_tasks() -> None:
    tasks = drawn_tasks(60)
    for kind, found in groups(tasks).items():
        assert (np.sum(list(found.values()), axis=0) == 1).all(), kind
    learned = groups(tasks)["learned regimes"][LEARNED]
    for task, is_learned in zip(tasks, learned, strict=True):
        knows_all = task.table_kind == "exact" and task.probe_cost == 0.0 and task.regime != "late"
        assert is_learned != knows_all


# ---- cells ----


def settings_for(tmp_path: Path, **changes: Any) -> EvaluationSettings:
    fewer = tuple(rival for rival in rivals(tmp_path / "none") if rival.name in ("fp32", "bf16_clip", "table"))
    return EvaluationSettings(**{"rivals": fewer, "tasks": 4, "out": tmp_path, "distribution": SMALL, **changes})


def test_an_interrupted_evaluation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(now: Progress) -> None:
        if now.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(settings_for(tmp_path), progress=stop)
    assert len(list((tmp_path / "cells").glob("*.json"))) == 2
    played: list[str] = []
    play = evaluating._play

    def noted(cell: Any, **rest: Any) -> Any:
        played.append(cell.rival.name)
        return play(cell, **rest)

    monkeypatch.setattr(evaluating, "_play", noted)
    told: list[Progress] = []
    found = evaluate(settings_for(tmp_path), progress=told.append)
    assert played == ["table"]
    assert [now.done for now in told] == [2, 3]
    assert told[0].seconds_left is None
    assert told[-1].seconds_left == 0.0
    assert [one.rival.name for one in found] == ["fp32", "bf16_clip", "table"]
    # half a file is as good as none
    cell = next((tmp_path / "cells").glob("*fp32-*"))
    cell.write_text(cell.read_text()[:50])
    again = evaluate(settings_for(tmp_path))
    assert played == ["table", "fp32"]
    for one, other in zip(found, again, strict=True):
        for a, b in zip(one.scores, other.scores, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_file_belongs_to_everything_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> set[str]:
        return {path.name for path in (tmp_path / "cells").glob("*.json")}

    plays = settings_for(tmp_path).rivals[2]
    evaluate(settings_for(tmp_path, rivals=(plays,)))
    first = names()
    changed = replace(plays, plays=TableSettings(clip=3.0))
    evaluate(settings_for(tmp_path, rivals=(changed,)))
    assert len(names() - first) == 1
    evaluate(settings_for(tmp_path, rivals=(plays,), tasks=5))
    assert len(names()) == 3
    monkeypatch.setattr(evaluating, "code_digest", lambda: "other code")
    evaluate(settings_for(tmp_path, rivals=(plays,)))
    assert len(names()) == 4


def test_further_banks_have_a_number_of_tasks_of_their_own(tmp_path: Path) -> None:
    one = settings_for(tmp_path).rivals[:1]
    found = evaluate(settings_for(tmp_path, rivals=one, banks=("test", "val"), other_tasks=2))
    expected = [
        (bank, len(evaluation_tasks(bank, count, distribution=SMALL))) for bank, count in (("test", 4), ("val", 2))
    ]
    assert [(played.bank, len(played.scores.score)) for played in found] == expected
    assert expected[0][1] > expected[1][1]


@pytest.mark.slow  # each process imports torch
def test_processes_change_nothing(tmp_path: Path) -> None:
    two = settings_for(tmp_path).rivals[1:]
    alone = evaluate(settings_for(tmp_path / "1", rivals=two))
    together = evaluate(settings_for(tmp_path / "2", rivals=two, processes=2))
    for one, other in zip(alone, together, strict=True):
        assert one.rival.name == other.rival.name
        np.testing.assert_array_equal(one.scores.score, other.scores.score)


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"banks": ("tests",)}, "Passed the banks"), ({"tasks": 0}, "`tasks=0`"), ({"processes": 0}, "`processes=0`")],
    ids=["bank", "tasks", "processes"],
)
def test_bad_settings_are_named(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        settings_for(tmp_path, **changes)


# ---- raises ----


def overflowing_task() -> tuple[Task, Twin]:
    """A task whose unit 1 overflows in fp16 and nowhere else."""
    task = draw_task(1, Distribution(units=(3,), architectures={"mlp": 1.0}, regimes=(1, 0, 0)))
    spec = task.spec.copy()
    spec["event_count"], spec["activation_bits"], spec["activation_mean"], spec["gradient_bits"] = 0, 0.0, 0.0, 0.0
    spec["activation_bits"][1], spec["loss_factor"] = 40.0, 1.0
    ladder = tuple(map(FORMATS.index, ("fp32", "bf16", "fp16")))
    return replace(task, spec=spec, ladder=ladder), Twin(2.0, 1.0)


def test_raises_are_counted_against_units_that_did_not_overflow() -> None:
    def lower(rows: Any) -> Any:
        return np.where(rows[:, INDEX["knob_precision"]] == 1.0, -1, 0)

    tasks = [overflowing_task()]
    guarded = count_raises(play_policy(tasks, lower, mode="ladder", record=True)[1])
    alone = count_raises(play_policy(tasks, lower, mode="ladder", guard=False, record=True)[1])
    assert guarded.offenders[2] == sum(guarded.offenders) > 0
    assert guarded.rate == 1.0
    assert guarded.base == 0.0
    assert alone.offenders[2] > guarded.offenders[2]  # it stays where it overflows
    assert alone.rate == 0.0
    assert alone.quiet[2] > 0


def test_base_rates_are_matched_by_level() -> None:
    raises = Raises((0, 3, 1), (0, 3, 0), (0, 10, 100), (0, 1, 50))
    assert raises.rate == pytest.approx(0.75)
    assert raises.base == pytest.approx(0.75 * 0.1 + 0.25 * 0.5)
    total = Raises.total([raises, raises])
    assert total.offenders == (0, 6, 2)
    assert np.isnan(Raises.total([]).rate)


# ---- results ----


def test_results_say_what_was_made_up() -> None:
    tasks = drawn_tasks(80)
    results = bank_results(tasks, made_up_results(80))
    json.dumps(results, allow_nan=False)
    assert (results["tasks"], results["seeds"]) == (80, 5)
    found = results["differences"]["fp32_clip"]["all"]
    assert found["difference"][0] == pytest.approx(0.25, abs=0.01)
    assert found["difference"][1] > 0.2
    assert found["win_rate"] == 1.0
    gains = [step["gain"][0] for step in results["ladder"][1:]]
    assert gains == pytest.approx([0.2, 0.1, 0.06, 0.04, 0.05], abs=0.01)
    assert strongest_table(results) == "table_learnt"
    by = results["differences"]["rule"]["by"]["regime"]
    assert sum(cell["tasks"] for cell in by.values()) == 80
    assert results["raises"]["guard"] == pytest.approx(
        {"offenders": 30, "rate": 1.0, "base": 0.0217, "lift": 46.2}, rel=0.01
    )
    assert results["raises"]["alone"]["rate"] == 0.5
    line = summary_line(results)
    assert LAST_LINE.fullmatch(line)
    assert line.startswith("policy: tasks=80 seeds=5 vs_fp32_clip=+0.2")
    assert line.endswith("raise_2=1.00")


def test_a_policy_that_loses_somewhere_is_said_to_lose() -> None:
    results = bank_results(drawn_tasks(60), made_up_results(60, worth={"policy": 0.38}))
    assert results["differences"]["table_learnt"]["all"]["difference"][2] < 0
    assert verdict(results["differences"]["table_learnt"]["all"]["difference"]) == "worse"
    assert verdict(results["differences"]["rule"]["all"]["difference"]) == "better"
    assert verdict([0.0, -0.1, 0.1]) == "tied"
    assert "vs_table_schedule=-0.0" in summary_line(results)
    text = markdown(results)
    assert "| worse" in text
    assert "policy alone" in text


def test_without_a_policy_there_are_scores_and_no_differences(tmp_path: Path) -> None:
    played = [one for one in made_up_results(20) if one.rival.name != "policy"]
    results = bank_results(drawn_tasks(20), played)
    assert results["differences"] == {}
    assert not draw(results, "nothing to draw", tmp_path / "none.png")
    assert LAST_LINE.fullmatch(summary_line(results))
    assert "Policy less rival" not in markdown(results)


def test_numbers_are_printed_with_their_intervals() -> None:
    assert interval([0.1234, 0.1, 0.2]) == "+0.123 [+0.100, +0.200]"
    assert interval([0.5, None, None], sign=False) == "0.500"
    assert interval([None, None, None]) == "n/a"


# ---- card ----


def card_document(**worth: float) -> dict[str, Any]:
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "command": "autoprec evaluate-policy",
        "versions": {"autoprec": "1.2.3", "torch": "2.11"},
        "encoding_version": 4,
        "policies": [{"folder": "x", "name": "ppo-offset-3", "mode": "offset", "weights_sha256": "ab" * 32}],
        "banks": {"test": bank_results(drawn_tasks(40), made_up_results(40, worth=worth))},
    }


def test_a_model_card_says_where_the_policy_loses() -> None:
    good = model_card(card_document(), made_up_trainings(2), command="autoprec train-policy --seeds 2")
    assert "No comparison has its whole interval below 0." in good
    assert "| 1 | 200000 | 10.0 | 1.410 | +0.030 |" in good
    for part in (
        "# ppo-offset-3",
        "ab" * 32,
        "autoprec 1.2.3, torch 2.11",
        "version of observations | 4",
        "Apache-2.0",
    ):
        assert part in good
    assert "$" not in good  # every place of the template was filled
    bad = model_card(card_document(policy=0.3))
    assert "- Worse: test, all tasks, against table + schedule: -0.0" in bad
    assert "Results of the trainings were not at hand" in bad


def test_a_model_card_needs_a_policy() -> None:
    with pytest.raises(ValueError, match="an evaluation without a policy"):
        model_card({**card_document(), "policies": []})


# ---- command ----


def test_the_command_evaluates_seeds_of_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = small_policies(tmp_path / "policies")
    words = ["evaluate-policy", "--policy", str(one), "--policy", str(other), "--tasks", "6", "--processes", "1"]
    words += ["--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    last = out.strip().splitlines()[-1]
    assert LAST_LINE.fullmatch(last)
    assert last.startswith("policy: tasks=6 seeds=2 ")
    document = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert document["summary"] == last
    assert [policy["name"] for policy in document["policies"]] == ["untrained-0", "untrained-1"]
    assert document["banks"]["test"]["ways"]["policy"]["seeds"] == 2
    # a new policy accepts what the table proposes
    assert document["banks"]["test"]["differences"]["table_learnt"]["all"]["difference"][0] == pytest.approx(0.0)
    assert (tmp_path / "out" / "test.png").stat().st_size > 10_000
    assert "| policy (2 seeds)" in (tmp_path / "out" / "evaluation.md").read_text()
    assert cli.main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["banks"] == document["banks"]  # from the files of the first time
    cells = len(list((tmp_path / "out" / "cells").glob("*.json")))
    assert f"{cells} of {cells} played: results that are there already" in captured.err


def test_the_table_may_stand_in_for_a_policy() -> None:
    found = {rival.name: rival for rival in chosen_rivals(["table"])}
    assert found["policy"].plays == found["table_learnt"].plays


def test_without_a_shipped_policy_the_table_is_played_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "SHIPPED", tmp_path / "none")
    words = ["evaluate-policy", "--tasks", "3", "--processes", "1", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0] == "This version ships no policy: the table is played in its place."
    assert "test: 3 tasks, the table in the place of a policy" in lines
    assert LAST_LINE.fullmatch(lines[-1])
    tables = lines[lines.index("") : -3]  # behind them: where the files are
    assert max(map(len, tables)) <= 80
    assert "policy (accepts the table)" in "\n".join(tables)


def test_nothing_of_a_picture_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig

    def noted(figure: Figure, *args: Any, **rest: Any) -> None:
        figures.append(figure)
        save(figure, *args, **rest)

    monkeypatch.setattr(Figure, "savefig", noted)
    assert draw(bank_results(drawn_tasks(80), made_up_results(80)), "test: 80 tasks", tmp_path / "test.png")
    (figure,) = figures
    for axes in figure.axes:
        for text in (axes.title, *axes.get_yticklabels()):
            box = text.get_window_extent()
            assert box.x0 >= 0.0, text
            assert box.x1 <= figure.bbox.x1, text


def test_results_belong_to_all_code_wherever_the_package_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "autoprec"
    for name in ("table.py", "policies/play.py", "envs/simulation.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    monkeypatch.setattr("autoprec.__file__", str(package / "__init__.py"))
    seen = {evaluating.code_digest()}
    for name in ("table.py", "policies/play.py", "envs/simulation.py"):
        (package / name).write_text("changed = 1")
        seen.add(evaluating.code_digest())
    assert len(seen) == 4


def test_help_teaches_and_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate-policy", "--help"]) == 0
    assert "autoprec evaluate-policy --quick" in capsys.readouterr().out
    out = ["--out", str(tmp_path)]
    for words, said in (
        (["--policy", str(tmp_path)], "has no policy.json"),
        (["--policy", "table", "--bank", "nowhere"], "nowhere"),
        (["--tasks", "1"], "--tasks"),
    ):
        assert cli.main(["evaluate-policy", *words, *out]) == 2
        assert said in re.sub(r"[\s│]+", " ", capsys.readouterr().err)

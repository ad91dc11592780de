"""The main job, end to end, judged by the scenario's own knowledge of what ran when.

One process loads and unloads BPF programs, another runs them under ``perf record -p``, and
``ksym record`` stands around it all. What the handler then prints is scored against the
truth that the samples carry in their comm (see ``tests/oracle``).
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.oracle import perfctl, procs, scenario, truth

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tests.oracle.truth import Score

HANDLER = f"{procs.REPO}/contrib/perf-script/ksym_handler.py"
SECOND = 1_000_000_000
ENOUGH = 0.995

pytestmark = pytest.mark.usefixtures("perf", "perf_python")


def ksym(*words: str, status: int | None = 0) -> procs.Done:
    line = [sys.executable, "-m", "ksym_plugin.cli", *words]
    return procs.run(line, scenario.SECONDS + 30, status=status)


class Recorded:
    """One scenario under ``ksym record``, and what perf and the handler make of it."""

    def __init__(self, directory: Path, *options: str, status: int = 0) -> None:
        self.history = str(directory / "x.db")
        around = ["record", "-o", self.history, "--"]
        done = ksym(*around, *scenario.command(str(directory), *options), status=status)
        self.said = done.err
        found = scenario.Result(str(directory))
        self.data = found.data
        self.truth = found.truth
        self._handled: procs.Done | None = None

    def plain(self) -> str:
        """What perf says alone."""
        return procs.run(["perf", "script", "-i", self.data, "--ns"], 60).out

    def handled(self) -> procs.Done:
        if self._handled is None:
            words = ["-i", self.data, "-s", HANDLER, "--", "-H", self.history]
            self._handled = procs.run(["perf", "script", *words], 120)
        return self._handled

    def score(self) -> Score:
        return truth.leaves(self.handled().out, self.truth)

    def resolve(self, address: int, time: int) -> str:
        at = f"{time // SECOND}.{time % SECOND:09}"
        words = ["-H", self.history, "--clock", "monotonic", "--at", at, "--json"]
        return ksym("resolve", *words, f"{address:#x}", status=None).out


def tally(text: str, label: str) -> int:
    """The number that stands next to ``label``, before or after it, on one line."""
    number = r"(\d[\d,]*)"
    found = re.search(rf"{number}[^\d\n]*\b{label}\b|\b{label}\b[^\d\n]*{number}", text)
    assert found is not None, f"no {label!r} in: {text}"
    return int((found[1] or found[2]).replace(",", ""))


def assert_all_right(score: Score) -> None:
    assert score.total > 1_000, score
    assert score.wrong == 0, score
    assert score.share_right >= ENOUGH, score


@pytest.fixture(scope="module", params=["mono", pytest.param("perf", marks=pytest.mark.slow)])
def turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    directory = tmp_path_factory.mktemp(f"turn-{request.param}")
    return Recorded(directory, "--clock", request.param)


def test_every_sample_in_a_program_gets_its_name(turn: Recorded) -> None:
    before = truth.leaves(turn.plain(), turn.truth)
    assert before.share_right < 0.15, before
    assert_all_right(turn.score())


def test_callers_are_named_too(turn: Recorded) -> None:
    score = truth.frames(turn.handled().out, turn.truth)
    assert score.wrong == 0, score
    assert score.share_right >= ENOUGH, score


def test_no_sample_is_lost_or_moved(turn: Recorded) -> None:
    def place(frame: truth.Frame) -> int | str:
        # perf hands a handler no map: a nameless user frame cannot be made file-relative.
        return frame.dso if frame.name == "[unknown]" and not frame.ip >> 63 else frame.ip

    def seen(text: str) -> list[tuple[str, int, int, list[int | str]]]:
        # The handler prints microseconds, as perf does without --ns.
        return [
            (sample.comm, sample.tid, sample.time // 1_000, [place(f) for f in sample.frames])
            for sample in truth.samples(text)
        ]

    assert seen(turn.handled().out) == seen(turn.plain())


def test_frames_of_programs_are_kernel_frames_to_flame_graphs(turn: Recorded) -> None:
    verdicts = truth.leaves(turn.handled().out, turn.truth).verdicts
    assert {verdict.frame.dso for verdict in verdicts if verdict.right} == {"[bpf]"}


def test_tally_says_what_perf_had_missed_and_named_wrong(turn: Recorded) -> None:
    before = truth.frames(turn.plain(), turn.truth)
    after = truth.frames(turn.handled().out, turn.truth)
    said = turn.handled().err
    assert tally(said, "renamed") == before.wrong
    assert tally(said, "newly named") >= before.missing - after.missing > 0
    assert tally(said, "still unknown") >= after.missing


def test_history_answers_for_each_program_while_it_ran(turn: Recorded) -> None:
    for program in turn.truth["programs"][::12]:
        start, _, name = program["symbols"][0]
        assert name in turn.resolve(start + 8, sum(program["run"]) // 2)


def test_between_two_programs_the_newcomer_is_not_named(turn: Recorded) -> None:
    for before, after in list(zip(turn.truth["programs"], turn.truth["programs"][1:]))[::12]:
        start, _, name = after["symbols"][0]
        between = (before["unloading"][1] + after["loading"][0]) // 2
        assert name not in turn.resolve(start, between)


@pytest.mark.slow
@pytest.mark.parametrize("clock", sorted(perfctl.CLOCKS))
@pytest.mark.parametrize("mode", ["subprograms", "same-name"])
def test_subprograms_and_reuse_under_one_name(tmp_path: Path, mode: str, clock: str) -> None:
    recorded = Recorded(tmp_path, "--mode", mode, "--clock", clock)
    assert_all_right(recorded.score())
    assert truth.frames(recorded.handled().out, recorded.truth).wrong == 0


@pytest.mark.slow
@pytest.mark.parametrize("clock", sorted(perfctl.CLOCKS))
def test_a_program_that_outlives_its_unload_keeps_its_name(tmp_path: Path, clock: str) -> None:
    recorded = Recorded(tmp_path, "--mode", "grace", "--count", "12", "--clock", clock)
    assert_all_right(recorded.score())


@pytest.mark.slow
def test_programs_older_than_the_recorder(tmp_path: Path) -> None:
    with scenario.loading(str(tmp_path), "preloaded", 60) as socket_path:
        recorded = Recorded(tmp_path, "--loader", socket_path)
    assert_all_right(recorded.score())
    # perf is right about these by itself, so ask the history alone as well.
    for program in recorded.truth["programs"][::12]:
        start, _, name = program["symbols"][0]
        assert name in recorded.resolve(start + 8, sum(program["run"]) // 2)


def assert_perf_is_right_alone(data: str, known: dict[str, Any]) -> None:
    text = procs.run(["perf", "script", "-i", data, "--ns"], 60).out
    assert_all_right(truth.leaves(text, known))


@pytest.mark.slow
def test_perf_started_before_the_recorder_is_not_harmed(tmp_path: Path) -> None:
    data = str(tmp_path / "before.perf.data")
    perf = perfctl.Recording(data, "perf", ["-a"], own_group=True)
    try:
        around = ["record", "-o", str(tmp_path / "x.db"), "--"]
        ksym(*around, *scenario.command(str(tmp_path), "--perf", "none"))
        perf.stop()
    except BaseException:
        perf.abort()
        raise
    assert_perf_is_right_alone(data, scenario.Result(str(tmp_path)).truth)


@pytest.mark.slow
def test_perf_started_after_the_recorder_is_not_harmed(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, "--perf", "all", "--clock", "perf")
    assert_perf_is_right_alone(recorded.data, recorded.truth)
    assert_all_right(recorded.score())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The scenario itself kills the recorder around it, after two thirds of the programs."""
    options = ["--kill-parent-after", "40"]
    return Recorded(tmp_path_factory.mktemp("killed"), *options, status=-signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_recorder_loses_at_most_its_last_batch(killed: Recorded) -> None:
    safe = killed.truth["killed"] - SECOND
    verdicts = truth.leaves(killed.handled().out, killed.truth).verdicts
    assert_all_right(truth.Score([v for v in verdicts if v.sample.time < safe]))


@pytest.mark.slow
def test_after_the_kill_perf_stands_and_nothing_is_made_up(killed: Recorded) -> None:
    plain = {
        verdict.sample.time // 1_000: verdict.frame.name
        for verdict in truth.leaves(killed.plain(), killed.truth).verdicts
    }
    for verdict in truth.leaves(killed.handled().out, killed.truth).verdicts:
        if not verdict.right:
            assert verdict.frame.name == plain[verdict.sample.time // 1_000]


@pytest.mark.slow
def test_the_next_reader_is_told_of_the_kill(killed: Recorded) -> None:
    assert re.search(r"killed|not closed", ksym("show", "-H", killed.history).err)

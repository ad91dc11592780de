"""The ground the live tests stand on: the scenario shows the problem, the scorer sees it."""

from __future__ import annotations

import sys
import time

import pytest

from tests.oracle import perfctl, probe, procs, programs, rawbpf, scenario, truth

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

LATE = "raise SystemExit(__import__('time').sleep(60))"


def plain_text(data: str) -> str:
    return procs.run(["perf", "script", "-i", data, "--ns", "-F", truth.FIELDS], 60).out


def test_probe_says_that_this_kernel_answers() -> None:
    assert probe.ask() == (probe.ANSWERS, "")


def test_probe_gives_up_on_a_child_that_does_not_answer() -> None:
    began = time.monotonic()
    state, reason = probe.judge([sys.executable, "-c", LATE], 0.3)
    assert state == probe.HANGS
    assert reason.startswith("bpf(2) hangs on this host")
    assert time.monotonic() - began < 5


def test_probe_tells_a_refusal_from_a_hang() -> None:
    child = [sys.executable, "-c", "print('Operation not permitted')"]
    state, reason = probe.judge(child, 20)
    assert (state, reason) == (probe.REFUSES, "bpf(2) cannot be used: Operation not permitted")


def test_programs_have_the_names_the_kernel_lists() -> None:
    fds = [
        programs.plain("oracle_plain", 1),
        programs.plain("oracle_cls", 2, prog_type=rawbpf.SCHED_CLS),
        programs.with_subprograms("cut_at_15_chars", ["a_name_of_30_characters_or_so", "sub"], 3),
    ]
    try:
        infos = [rawbpf.info(fd) for fd in fds]
        listed = rawbpf.kallsyms_bpf()
    finally:
        rawbpf.close(*fds)
    names = [[listed[start].split("_", 3)[3] for start in info.starts] for info in infos]
    assert names == [["oracle_plain"], ["oracle_cls"], ["a_name_of_30_characters_or_so", "sub"]]
    assert all(listed[info.starts[0]].startswith(f"bpf_prog_{info.tag}_") for info in infos)


@pytest.mark.slow
@pytest.mark.usefixtures("perf")
@pytest.mark.parametrize("clock", sorted(perfctl.CLOCKS))
def test_perf_of_one_task_is_blind_to_another_tasks_programs(tmp_path: Path, clock: str) -> None:
    found = scenario.run(str(tmp_path), "--clock", clock)
    text = plain_text(found.data)
    assert truth.strays(text, found.truth) == []
    score = truth.leaves(text, found.truth)
    assert score.total >= 1_500, score
    assert score.share_right < 0.15, score
    assert score.wrong > 0.1 * score.total, score
    assert score.missing > 0.1 * score.total, score


@pytest.mark.slow
@pytest.mark.usefixtures("perf")
@pytest.mark.parametrize("clock", sorted(perfctl.CLOCKS))
def test_most_samples_of_a_run_lie_in_the_program(tmp_path: Path, clock: str) -> None:
    found = scenario.run(str(tmp_path), "--clock", clock, "--count", "10")
    text = plain_text(found.data)
    running = [
        sample
        for sample in truth.samples(text)
        if sample.tid == found.truth["tid"] and sample.comm != "idle"
    ]
    assert truth.leaves(text, found.truth).total > 0.9 * len(running) > 100


@pytest.mark.slow
@pytest.mark.usefixtures("perf")
@pytest.mark.parametrize("mode", ["turn", "subprograms", "same-name"])
def test_successors_take_the_addresses_of_their_predecessors(tmp_path: Path, mode: str) -> None:
    found = scenario.run(str(tmp_path), "--mode", mode, "--perf", "none")
    owners: dict[int, set[int]] = {}
    for program in found.truth["programs"]:
        for start, end, _ in program["symbols"]:
            for chunk in range(start // 64, (end + 63) // 64):
                owners.setdefault(chunk, set()).add(program["id"])
    assert max(len(ids) for ids in owners.values()) > 5


def test_lifetimes_of_the_scenario_are_in_order(tmp_path: Path) -> None:
    found = scenario.run(str(tmp_path), "--perf", "none", "--count", "12", "--ms", "2")
    last = 0
    for program in found.truth["programs"]:
        times = [*program["loading"], *program["run"], *program["unloading"]]
        assert times == sorted(times)
        assert times[0] > last
        last = times[-1]


def test_a_program_outlives_its_unload_in_grace_mode(tmp_path: Path) -> None:
    found = scenario.run(str(tmp_path), "--perf", "none", "--mode", "grace", "--count", "3")
    for program in found.truth["programs"]:
        began, gone, ended = program["run"][0], program["unloading"][1], program["run"][1]
        # By how much depends on who else wants the CPU; that it does is the mode's point.
        assert began < gone < ended


SCORED = """\
p1 70 1.000001: 250000 cpu-clock:pppH:
\tffffffffc0001010 bpf_prog_00_a+0x10 ([bpf])
\tffffffff81000000 do_syscall+0x1 ([kernel.kallsyms])

p1 70 1.000002: 250000 cpu-clock:pppH:
\tffffffffc0001010 bpf_prog_00_b+0x10 (bpf_prog_00_b)
\tffffffffc0001100 bpf_prog_00_a+0x100 ([bpf])

p1    70/70 [001]  1.000003: 250000 cpu-clock:pppH:
\tffffffffc0001020 [unknown] ([kernel.kallsyms])

p1 71 1.000004: 250000 cpu-clock:pppH:
\tffffffffc0001020 another task ([unknown])

idle 70 1.000005: 250000 cpu-clock:pppH:
\tffffffff81000000 do_syscall ([kernel.kallsyms])
"""


def test_scorer_counts_right_wrong_and_missing() -> None:
    known = {
        "tid": 70,
        "programs": [
            {
                "comm": "p1",
                "index": 1,
                "run": [0, 10**10],
                "symbols": [[0xFFFFFFFFC0001000, 0xFFFFFFFFC0001100, "bpf_prog_00_a"]],
            }
        ],
    }
    score = truth.leaves(SCORED, known)
    assert (score.total, score.right, score.wrong, score.missing) == (3, 1, 1, 1)
    assert [verdict.sample.time for verdict in score.verdicts if verdict.wrong] == [1_000_002_000]
    assert truth.frames(SCORED, known).right == 2
    assert truth.strays(SCORED, known) == []
    moved = SCORED.replace("p1 70 1.000001", "idle 70 1.000001")
    assert [sample.time for sample in truth.strays(moved, known)] == [1_000_001_000]

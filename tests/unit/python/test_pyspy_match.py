"""Samples dated and matched, and perf's text read: on a small world whose truth is known.

A thread runs functions one after the other; py-spy looks at it at some instants, perf at
others. Whatever is claimed of perf's instants is compared with what ran.
"""

from __future__ import annotations

import random
from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.python import pyspy, pyspy_match
from ksym_plugin.python.pyspy import Hit, Profile, Stack, Thread
from ksym_plugin.python.pyspy_match import Dated, Dating, Matcher
from ksym_plugin.timeline.errors import KsymError

MS = 1_000_000


def stack(*names: str) -> Stack:
    return Stack(tuple((name, not name.startswith("c_")) for name in names))


A, B = stack("main", "a"), stack("main", "b")
#: A self-check that nothing has passed.
FAILED = pyspy_match.Check()


def hit(tid: int, time: int, *kernel: str, pid: int = 1, stopped: bool = False) -> Hit:
    return Hit("py", pid, tid, time, kernel, stopped)


def dated(times: list[int], stacks: list[Stack], slack: int = 0, *, mean: float = 10) -> Dated:
    return Dated(times, stacks, slack, mean)


def test_neighbours_that_agree_give_their_frames() -> None:
    matcher = Matcher(dated([0, 10, 20], [A, A, B]), None)
    found = matcher.at(hit(1, 5))
    assert found is not None and found.is_whole and found.frames == ("main", "a")


def test_neighbours_that_differ_give_what_they_share() -> None:
    found = Matcher(dated([0, 10, 20], [A, A, B]), None).at(hit(1, 15))
    assert found is not None and not found.is_whole and found.frames == ("main",)


def test_neighbours_too_far_apart_are_not_believed() -> None:
    found = Matcher(dated([0, 41, 50], [A, A, A]), None).at(hit(1, 20))
    assert found is not None and not found.is_whole and found.frames == ("main", "a")


def test_before_the_first_and_after_the_last_nothing_is_known() -> None:
    matcher = Matcher(dated([10, 20], [A, A]), None)
    assert matcher.at(hit(1, 9)) is None
    assert matcher.at(hit(1, 20)) is None
    assert matcher.at(hit(1, 15)) is not None


def test_a_caller_that_is_another_counts_as_another() -> None:
    other = stack("main", "x", "a")
    found = Matcher(dated([0, 10], [A, other]), None).at(hit(1, 5))
    assert found is not None and found.frames == ("main",)


def test_withheld_leaves_are_not_given_and_callers_have_to_be_steady() -> None:
    deep = [stack("main", "work", name) for name in "abcabc"]
    found = Matcher(dated([0, 10, 20, 30, 40, 50], deep), FAILED).at(hit(1, 25))
    assert found is not None and not found.is_whole and found.frames == ("main", "work")
    found = Matcher(dated([0, 10, 20, 30], [A, A, A, A]), FAILED).at(hit(1, 15))
    assert found is not None and found.frames == ("main",)


def test_native_frames_are_given_where_both_have_them() -> None:
    first = stack("c_start", "main", "a", "c_read", "c_copy")
    last = stack("c_start", "main", "c_call", "a", "c_read", "c_wait")
    found = Matcher(dated([0, 10], [first, last]), None).at(hit(1, 5))
    assert found is not None and found.is_whole
    assert found.frames == ("c_start", "main", "a", "c_read")


functions = st.lists(st.integers(0, 2), min_size=2, max_size=30)


@given(functions, st.data(), st.integers(0, 3))
def test_no_more_is_claimed_than_both_ends_say(
    kinds: list[int], data: st.DataObject, slack: int
) -> None:
    """Also when up to ``slack`` samples are missing at the beginning."""
    stacks = [stack("main", "abc"[kind]) for kind in kinds]
    lost = data.draw(st.integers(0, slack))
    times = [10 * at for at in range(len(stacks) + slack)]
    # Sample k was taken at the (k + lost)-th instant.
    matcher = Matcher(dated(times, stacks, slack), None)
    time = data.draw(st.integers(0, times[-1]))
    found = matcher.at(hit(1, time))
    if found is None:
        return
    before = bisect_right(times, time) - 1 - lost
    near = {stacks[at].python for at in (before, before + 1) if 0 <= at < len(stacks)}
    assert near
    if found.is_whole:
        assert near == {found.frames}
    else:
        assert all(python[: len(found.frames)] == found.frames for python in near)


# Dating


def log_of(rounds: list[tuple[int, list[int]]], first: list[int]) -> pyspy.Log:
    log = pyspy.Log()
    for at, tids in [(-100, first), *rounds]:
        log.locks += [(at, tid, True) for tid in tids]
        log.locks += [(at + 1, tid, False) for tid in tids]
    log.named = [-99]
    return log


def profile_of(counts: dict[int, int], version: str = "0.4.3") -> Profile:
    profile = Profile(version)
    for tid, count in counts.items():
        profile.threads[tid] = Thread(None)
        profile.threads[tid].samples = [stack("main", str(at)) for at in range(count)]
    return profile


def test_the_kth_round_dates_the_kth_sample() -> None:
    log = log_of([(0, [1, 2]), (10, [1, 2]), (20, [1])], [1, 2])
    dating = pyspy_match.date(profile_of({1: 3, 2: 2}), log, 1000, {})
    assert dating.threads[1].times == [1000, 1010, 1020]
    assert dating.threads[2].times == [1000, 1010]
    assert (dating.threads[1].slack, dating.threads[2].slack) == (0, 0)


def test_what_is_cut_off_at_the_end_all_lack_alike() -> None:
    log = log_of([(10 * at, [1, 2]) for at in range(5)], [1, 2])
    dating = pyspy_match.date(profile_of({1: 4, 2: 4}), log, 0, {})
    assert [thread.slack for thread in dating.threads.values()] == [0, 0]
    assert dating.threads[1].times == [0, 10, 20, 30]


def test_a_thread_that_lacks_more_may_lack_it_anywhere() -> None:
    log = log_of([(10 * at, [1, 2] if at < 4 else [1]) for at in range(40)], [1])
    dating = pyspy_match.date(profile_of({1: 40, 2: 3}), log, 0, {})
    assert dating.threads[2].slack == 1
    assert dating.threads[2].times == [0, 10, 20, 30]


def test_ids_in_a_namespace_are_perf_s() -> None:
    log = log_of([(0, [101]), (10, [101])], [101])
    dating = pyspy_match.date(profile_of({1: 2}), log, 0, {1: 101})
    assert [*dating.threads] == [101]


def test_threads_that_are_just_made_are_not_their_maker() -> None:
    log = log_of([(10 * at, [1]) for at in range(6)], [1])
    profile = profile_of({1: 4})
    samples = profile.threads[1].samples
    own = [stack(), *samples, stack()]
    profile.threads[1].samples = [*own[:3], stack(), *own[3:]]
    dating = pyspy_match.date(profile, log, 0, {})
    assert [each.python for each in dating.threads[1].stacks] == [each.python for each in own]
    assert dating.threads[1].times == [0, 10, 20, 30, 40, 50]


def test_rate_and_pause_are_of_the_log() -> None:
    log = log_of([(10 * MS * at, [1]) for at in range(11)], [1])
    dating = pyspy_match.date(profile_of({1: 11}), log, 0, {})
    assert dating.rate == pytest.approx(110, rel=0.01)
    assert dating.pause == pytest.approx(11 / (100 * MS))


def test_more_than_can_be_cut_off_at_the_end_may_be_missing_anywhere() -> None:
    log = log_of([(10 * at, [1]) for at in range(9)], [1])
    dating = pyspy_match.date(profile_of({1: 4}), log, 0, {})
    assert dating.threads[1].slack == 2
    assert dating.threads[1].times == [0, 10, 20, 30, 40, 50]


def test_rounds_that_failed_may_be_any() -> None:
    log = log_of([(10 * at, [1]) for at in range(8)], [1])
    log.errors = 2
    dating = pyspy_match.date(profile_of({1: 5}), log, 0, {})
    assert dating.threads[1].slack == 2
    assert dating.threads[1].times == [0, 10, 20, 30, 40, 50, 60]


def test_a_process_that_exits_is_stopped_to_no_effect_at_its_end() -> None:
    log = log_of([(10 * at, [1, 2] if at < 9 else [1]) for at in range(40)], [1])
    log.exited = True
    dating = pyspy_match.date(profile_of({1: 20, 2: 9}), log, 0, {}, has_idle=True)
    assert dating.threads[1].slack == 0
    assert dating.threads[1].times == [*range(0, 200, 10)]
    # Without --idle, samples may be missing anywhere.
    with pytest.raises(KsymError, match="--idle"):
        pyspy_match.date(profile_of({1: 20, 2: 9}), log, 0, {})


@pytest.mark.parametrize("count", [1, 3, 20])
def test_numbers_that_do_not_fit_are_refused(count: int) -> None:
    log = log_of([(10 * at, [1]) for at in range(18)], [1])
    with pytest.raises(KsymError, match=r"0\.9\.9 has not been tried"):
        pyspy_match.date(profile_of({1: count}, "0.9.9"), log, 0, {})


def test_a_thread_that_does_not_fit_is_set_aside() -> None:
    log = log_of([(10 * at, [1, 2] if at < 19 else [1]) for at in range(200)], [1])
    dating = pyspy_match.date(profile_of({1: 200, 2: 2}), log, 0, {})
    assert dating.misfits == {2}
    assert [*dating.threads] == [1]


# The self-check


def check(stacks: list[Stack], times: list[int]) -> pyspy_match.Check:
    verdict = pyspy_match.Check()
    verdict.add(dated([10 * at for at in range(len(stacks))], stacks), [hit(1, at) for at in times])
    return verdict


def test_only_samples_with_hits_on_both_sides_are_checked() -> None:
    verdict = check([A, A, A, A, A], [5, 15])
    assert (verdict.checked, verdict.right) == (1, 1)
    assert check([A, A, A], []).checked == 0


def test_what_neighbours_predict_wrongly_is_counted() -> None:
    verdict = check([A, B, A, A, A], [5, 15, 25, 35])
    assert (verdict.checked, verdict.right) == (2, 1)


def test_the_gate_wants_both_enough_and_many() -> None:
    steady = [A] * 52
    hits = [10 * at + 5 for at in range(52)]
    assert check(steady, hits).passes
    assert not check(steady[:51], hits).passes
    flickering = [A, B] * 40
    assert not check(flickering, [10 * at + 5 for at in range(80)]).passes


def long_and_short(seed: int) -> tuple[Dated, list[tuple[Hit, str]]]:
    """Ten seconds of 97 ms in one system call and 3 ms in another, of two functions.

    py-spy's samples at its default rate, and perf's with what ran at each.
    """
    chance = random.Random(seed)
    began = [0]
    while began[-1] < 10_000 * MS:
        for length in (97, 3):
            began.append(began[-1] + int(length * MS * chance.uniform(0.8, 1.2)))

    def at(time: int) -> str:
        return ("read", "getdents64")[(bisect_right(began, time) - 1) % 2]

    times = [0]
    while times[-1] < began[-1]:
        times.append(times[-1] + MS // 2 + int(chance.expovariate(100) * 1000 * MS))
    hits = []
    for time in range(MS // 3, began[-1], MS):
        call = () if chance.random() < 0.2 else ("entry_[k]", f"__x64_sys_{at(time)}_[k]")
        hits.append((hit(1, time, *call), at(time)))
    stacks = [stack("main", at(time)) for time in times]
    return dated(times, stacks, mean=times[-1] / len(times)), hits


@pytest.mark.parametrize("slack", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_too_short_to_be_met_is_not_given_another_function(seed: int, slack: int) -> None:
    samples, hits = long_and_short(seed)
    # Where one sample failed, nobody knows which.
    samples = samples._replace(stacks=samples.stacks[slack:], slack=slack)
    verdict = pyspy_match.Check()
    verdict.add(samples, [each for each, _ in hits])
    assert verdict.passes
    matcher = Matcher(samples, verdict)
    answers = [(matcher.at(each), function) for each, function in hits]
    given = [
        (found.frames[-1], function) for found, function in answers if found and found.is_whole
    ]
    assert all(leaf == function for leaf, function in given)
    # What is certain is still given: most of the time in the long call.
    assert slack or len(given) > len(hits) / 2


# Grafting


def test_samples_are_sorted_by_what_is_known() -> None:
    dating = Dating({1: dated([0, 10, 20], [A, A, B])}, natives={2})
    hits = [hit(1, 5, "sys"), hit(1, 15, "sys"), hit(1, 30), hit(2, 5, "sys"), hit(3, 5)]
    hits += [hit(4, 5, pid=9), hit(1, 6, "ptrace_stop", stopped=True)]
    grafted = pyspy_match.graft(pyspy_match.by_thread(hits), dating, None)
    assert grafted.stacks.by_text() == {
        "py;main;a;sys": 1,
        f"py;main;{pyspy_match.UNCERTAIN};sys": 1,
        f"py;{pyspy_match.STACK_UNKNOWN}": 2,
        f"py;{pyspy_match.NO_PYTHON};sys": 1,
        f"py;{pyspy_match.NO_PYTHON}": 1,
    }
    assert grafted.outcomes == {
        pyspy_match.MATCHED: 1,
        pyspy_match.PARTIAL: 1,
        pyspy_match.UNKNOWN: 2,
        pyspy_match.NATIVE: 2,
        pyspy_match.STOPPED: 1,
    }
    assert grafted.line().startswith("6 samples of perf: 16.7 % matched, 16.7 % uncertain, 33.3 %")


def test_two_recordings_of_different_processes_are_refused() -> None:
    dating = Dating({1: dated([0, 10], [A, A])})
    with pytest.raises(KsymError, match="both"):
        pyspy_match.graft(pyspy_match.by_thread([hit(2, 5)]), dating, None)


# perf's text

TEXT = b"""\
# event : name = cpu-clock, , id = { 1 }, use_clockid = 1, ksymbol = 1, clockid = 1
# reference time: 2026-11-30 09:54:35 = 1796032475.002642 (TOD) = 17881.737789988 (monotonic)
#
py;x 5/6 17882.000000001: cpu-clock:
\tffffffff816ce992 link_path_walk+0xa2 ([kernel.kallsyms])
\tffffffff81000130 entry_SYSCALL_64_after_hwframe+0x76 ([kernel.kallsyms])
\t    7fcdfde4524a __libc_start_main+0x1 (/lib/libc.so.6)

py 5/5 17882.000000002: cpu-clock:

py 5/5 17882.000000003: cpu-clock:
\tffffffff81000001 ptrace_stop+0x2 ([kernel.kallsyms])

py 5/5 17882.000000004: cycles:
\tffffffffc0000001 bpf_prog_0123456789abcdef_f+0x1 ([bpf])

"""


def test_perf_s_text_is_read() -> None:
    reader = pyspy.PerfReader()
    hits = list(reader.hits([TEXT]))
    assert reader.is_monotonic is True
    assert reader.shift == 17881737789988 - 1796032475002642000
    assert [(h.comm, h.pid, h.tid, h.time % 10, h.is_stopped) for h in hits] == [
        ("py:x", 5, 6, 1, False),
        ("py", 5, 5, 2, False),
        ("py", 5, 5, 3, True),
    ]
    assert hits[0].kernel == ("entry_SYSCALL_64_after_hwframe_[k]", "link_path_walk_[k]")
    assert reader.passed_over == 1


def test_perf_s_text_may_come_in_any_pieces() -> None:
    for size in (1, 7, 100):
        pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
        hits = list(pyspy.PerfReader().hits(pieces))
        assert [len(h.kernel) for h in hits] == [2, 0, 1]


def test_a_header_that_a_task_s_name_makes_up_is_not_believed() -> None:
    text = TEXT.replace(b"py 5/5", b"# event : 5/5").replace(b"clockid = 1\n", b"clockid = 7\n")
    reader = pyspy.PerfReader()
    assert len(list(reader.hits([text]))) == 3
    assert reader.is_monotonic is False


@given(st.lists(st.sampled_from(TEXT.splitlines(keepends=True)) | st.binary(max_size=60)))
def test_any_text_is_read(lines: list[bytes]) -> None:
    for found in pyspy.PerfReader().hits(lines):
        assert all(";" not in frame and "\n" not in frame for frame in found.kernel)
        assert ";" not in found.comm

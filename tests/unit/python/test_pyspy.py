"""py-spy's formats and its log, as it writes them and as somebody else might."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.python import pyspy
from ksym_plugin.stacks.folded import frame_of
from ksym_plugin.stacks.folded import parse as folded
from ksym_plugin.stacks.frames import PYTHON, USER
from ksym_plugin.timeline.errors import KsymError

if TYPE_CHECKING:
    from typing import Any

#: py-spy 0.3's raw format with --subprocesses: command lines are frames, with what they hold.
RAW = b"""\
process 20:"sh -c true; a 1";process 22:"python3 job.py -f";<module> (job.py:4);go (lib/it.py:9) 17
process 22:"python3 job.py";thread (0x7F00BB): Worker-1 thread_2;loop (worker.py:310) 3
"""


def frame(name: str, file: str = "/x/a.py", line: int | None = 3) -> dict[str, Any]:
    return {"name": name, "file": file, "line": line, "col": None}


def document(
    frames: list[dict[str, Any]], samples: list[list[int]], title: str = 'Thread 7 "Main"'
) -> dict[str, Any]:
    profile = {"type": "sampled", "name": title, "samples": samples, "weights": [0.01] * 9}
    return {"profiles": [profile], "shared": {"frames": frames}, "exporter": "py-spy@0.4.3"}


def parse(document: object) -> pyspy.Profile:
    return pyspy.load(json.dumps(document).encode())


def test_command_lines_are_one_frame_each() -> None:
    counts = folded(RAW.splitlines()).by_text()
    (first, _), (second, _) = counts.items()
    assert [*counts.values()] == [17, 3]
    assert len(first.split(";")) == 4
    assert first.split(";")[0] == 'process 20:"sh -c true: a 1"'
    assert second.split(";")[1:] == [
        "thread (0x7F00BB): Worker-1 thread_2",
        "loop (worker.py:310)",
    ]


def test_thread_and_process_are_read_from_a_profile_s_name() -> None:
    title = 'Process 12 Thread 140001 "Main \\"x\\""'
    frames = [frame("<module>", line=None), frame("f")]
    ((tid, thread),) = parse(document(frames, [[0, 1], [0]], title)).threads.items()
    assert (thread.pid, tid) == (12, 140001)
    assert [stack.python for stack in thread.samples] == [
        ("<module> (/x/a.py)", "f (/x/a.py)"),
        ("<module> (/x/a.py)",),
    ]


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ('Thread 0x7F00AA "MainThread"', "pthread"),
        ('Process 12 Thread 0x7f00aa ""', "pthread"),
        ("all threads, merged", "no speedscope file of py-spy's"),
        (f'Thread {"9" * 5000} "m"', "no speedscope file of py-spy's"),
    ],
)
def test_profiles_whose_names_tell_no_thread_of_the_kernel_s(title: str, words: str) -> None:
    with pytest.raises(KsymError, match=words):
        parse(document([frame("f")], [[0]], title))


def test_a_thread_s_name_may_hold_quotes() -> None:
    profile = parse(document([frame("f")], [[0]], 'Thread 12 "a "quoted" one"'))
    assert [*profile.threads] == [12]


def test_the_frame_of_the_thread_is_believed_not_the_profile_s_name() -> None:
    frames = [frame("thread (8): b", "", 0), frame("thread (9): c", "", 0), frame("f")]
    profile = parse(document(frames, [[0, 2], [1, 2], [0]]))
    assert {tid: len(thread.samples) for tid, thread in profile.threads.items()} == {8: 2, 9: 1}
    assert profile.threads[8].samples[0].python == ("f (/x/a.py)",)
    assert profile.threads[8].samples[1].python == ()


def test_processes_are_told_apart_by_the_innermost_frame() -> None:
    frames = [
        frame('process 1:"sh -c "x""', "", 0),
        frame('process 2:"python"', "", 0),
        frame("thread (3): m", "", 0),
        frame("f"),
    ]
    profile = parse(document(frames, [[0, 1, 2, 3]]))
    ((tid, thread),) = profile.threads.items()
    assert (thread.pid, tid) == (2, 3)
    assert thread.samples[0].python == ("f (/x/a.py)",)


def test_old_py_spy_has_threads_without_names() -> None:
    frames = [frame("thread (3)", "", 0), frame("f")]
    assert [*parse(document(frames, [[0, 1]])).threads] == [3]


def test_samples_of_a_thread_in_two_profiles_have_no_order() -> None:
    once = document([frame("thread (3)", "", 0)], [[0]])
    once["profiles"] *= 2
    assert not parse(once).threads[3].in_order


def test_pthread_ids_are_refused() -> None:
    frames = [frame("thread (0x7F04): m", "", 0)]
    with pytest.raises(KsymError, match="pthread"):
        parse(document(frames, [[0]], 'Thread 0x7F04 "m"'))


def test_numbers_of_frames_do_not_count_from_the_end() -> None:
    with pytest.raises(KsymError, match="no speedscope file"):
        parse(document([frame("thread (3)", "", 0), frame("f")], [[0, -1]]))


def test_native_frames_are_no_python_frames() -> None:
    frames = [frame("<module>"), frame("os_stat", "/usr/lib/libpython3.11.so.1.0", 0)]
    (thread,) = parse(document(frames, [[0, 1]])).threads.values()
    assert thread.samples[0].python == ("<module> (/x/a.py)",)
    assert thread.samples[0].frames[1] == ("os_stat", False)
    assert frame_of("os_stat").kind == USER


@pytest.mark.parametrize("file", ["/x/a.py", "<frozen importlib._bootstrap>", "/usr/bin/tool"])
def test_functions_are_python_s_in_folded_stacks_whatever_the_file(file: str) -> None:
    found = frame_of(pyspy.function_frame("f<locals>.g", file))
    assert found.location is not None
    assert (found.kind, found.name, found.location.file) == (PYTHON, "f<locals>.g", file)


@given(st.text(), st.text())
def test_no_name_breaks_a_folded_stack(name: str, file: str) -> None:
    text = pyspy.function_frame(name, file)
    assert ";" not in text
    assert len(text.splitlines()) <= 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
)


@given(json_values)
def test_any_other_json_is_refused(value: object) -> None:
    with pytest.raises(KsymError):
        parse(value)


@given(json_values, st.sampled_from(["profiles", "shared", "samples", "name", "frames"]))
def test_a_part_of_another_shape_is_refused_or_read(value: object, part: str) -> None:
    whole = document([frame("thread (3)", "", 0), frame("f")], [[0, 1]])
    if part in whole:
        whole[part] = value
    elif part == "frames":
        whole["shared"]["frames"] = value
    else:
        whole["profiles"][0][part] = value
    with contextlib.suppress(KsymError):
        parse(whole)


@pytest.mark.parametrize("text", [b"f (a.py:1) 3\n", b"", b"[" * 100_000, b"\xff\xfe"])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(KsymError, match="raw"):
        pyspy.load(text)


# The log

LOG = b"""\
[2026-11-30T02:40:46.372274092Z INFO  py_spy::config] config Config {
        gil_only: false,
        blocking: Lock,
        pid: Some(
            8011,
        ),
    }
[2026-11-30T02:40:46.400000000Z INFO  py_spy::python_spy] Got virtual memory maps from pid 5:
[2026-11-30T02:40:46.500000000Z INFO  py_spy::python_spy] python version 3.11.2 detected
[2026-11-30T02:40:46.600000000Z DEBUG remoteprocess::linux] attached to thread 5
[2026-11-30T02:40:46.600100000Z DEBUG remoteprocess::linux] attached to thread 6
[2026-11-30T02:40:46.600200000Z INFO  py_spy::python_spy] looking up thread names
[2026-11-30T02:40:46.600300000Z DEBUG remoteprocess::linux] detached from thread 5
[2026-11-30T02:40:46.600400000Z DEBUG remoteprocess::linux] detached from thread 6
py-spy> Sampling process 100 times a second for 10 seconds. Press Control-C to exit.

[2026-11-30T02:40:47.000000001Z DEBUG remoteprocess::linux] attached to thread 5
[2026-11-30T02:40:47.000000002Z DEBUG remoteprocess::linux] attached to thread 6
[2026-11-30T02:40:47.000000003Z DEBUG remoteprocess::linux] detached from thread 5
[2026-11-30T02:40:47.000000004Z DEBUG remoteprocess::linux] detached from thread 6
[2026-11-30T02:40:48.000000000Z DEBUG remoteprocess::linux] attached to thread 6
[2026-11-30T02:40:48.000000009Z DEBUG remoteprocess::linux] detached from thread 6
py-spy> Wrote speedscope file to 's.json'. Samples: 380 Errors: 2
"""
#: By date -u -d 2026-11-30T02:40:47 +%s.
SECOND = 1_796_006_447 * 10**9


def test_a_log_is_read() -> None:
    log = pyspy.parse_log(LOG.splitlines(keepends=True))
    assert log.tids == {5, 6}
    assert log.locks[4] == (SECOND + 1, 5, True)
    assert log.errors == 2
    assert (log.settings["gil_only"], log.settings["blocking"]) == ("false", "Lock")


def test_failed_samples_are_counted_where_the_total_is_missing() -> None:
    failed = b"[2026-11-30T02:40:47.5Z WARN  py_spy] Failed to get stack trace from 5: no"
    lines = LOG.splitlines()
    assert pyspy.parse_log([*lines[:-1], failed, failed, failed]).errors == 3
    assert pyspy.parse_log([*lines[:-1], failed, failed, lines[-1]]).errors == 2


def test_rounds_are_of_all_threads_and_the_first_gives_no_sample() -> None:
    log = pyspy.parse_log(LOG.splitlines())
    rounds = pyspy.rounds(log)
    assert [round.tids for round in rounds] == [[5, 6], [5, 6], [6]]
    assert pyspy.starting(log, rounds, True) == 1
    second = rounds[1]
    assert (second.began, second.at, second.ended) == (SECOND + 1, SECOND + 2, SECOND + 4)


def test_rounds_of_two_processes_may_cross() -> None:
    lines = LOG.splitlines()
    stops = [line for line in lines if b"tached" in line]
    first, second = (
        [line for line in stops if line.endswith(b"thread %d" % tid)] for tid in (5, 6)
    )
    crossed = [line for pair in zip(first, second) for line in pair]
    log = pyspy.parse_log(crossed)
    assert len(pyspy.rounds(log, {5})) == len(first) // 2
    assert len(pyspy.rounds(log, {6})) == len(first) // 2


@given(st.lists(st.sampled_from(LOG.splitlines()) | st.binary(max_size=80)))
def test_any_log_is_read(lines: list[bytes]) -> None:
    log = pyspy.parse_log(lines)
    rounds = pyspy.rounds(log)
    assert 0 <= pyspy.starting(log, rounds, True) <= len(rounds)
    assert sum(len(round.tids) for round in rounds) == sum(is_stop for _, _, is_stop in log.locks)

"""Real recordings, grafted, against what the profiled process said of itself. No perf is run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ksym_plugin.python import pyspy_match
from ksym_plugin.stacks import folded
from ksym_plugin.stacks.folded import frame_of
from ksym_plugin.stacks.frames import PYTHON
from tests.oracle.spied import NAMES, Recording, score
from tests.unit.cli.test_cli import ksym

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

#: Recordings whose leaves hold.
GOOD = [name for name in NAMES if name != "phases-2"]


@pytest.fixture
def recording(request: pytest.FixtureRequest, tmp_path: Path) -> Recording:
    return Recording(request.param, tmp_path)


def graft(recording: Recording, *more: str) -> Result:
    output = recording.path("out.json")
    call = ["pyspy", "graft", *recording.arguments, "-o", output, *more]
    return ksym(*call, env={"PATH": "/nonexistent"})


@pytest.mark.parametrize("recording", GOOD, indirect=True)
def test_leaves_that_are_given_are_right(recording: Recording) -> None:
    result, verdict = score(recording.folder)
    assert verdict.passes
    assert result.given > 200
    assert result.right >= 0.99 * result.given


@pytest.mark.parametrize("recording", ["phases-2"], indirect=True)
def test_check_fails_where_leaves_would_be_wrong(recording: Recording) -> None:
    result, verdict = score(recording.folder)
    assert result.right < 0.6 * result.given
    assert not verdict.passes


@pytest.mark.parametrize("recording", GOOD, indirect=True)
def test_bpf_frames_are_named_and_under_the_function_that_ran_them(recording: Recording) -> None:
    stacks = recording.path("out.folded")
    done = graft(recording, "--folded", stacks)
    assert done.exit_code == 0, done.output
    with open(stacks, "rb") as file:
        counts = folded.parse(file).by_text()
    right = sum(count for stack, count in counts.items() if is_under(stack, "filtering ("))
    wrong = sum(count for stack, count in counts.items() if is_under(stack, "(")) - right
    assert right > 50
    assert right >= 0.99 * (right + wrong)


@pytest.mark.parametrize("recording", ["phases-2"], indirect=True)
def test_withheld_leaves_are_nowhere_unless_forced(recording: Recording) -> None:
    stacks = recording.path("out.folded")
    functions = (b"statting (", b".reading (", b".filtering (")
    done = graft(recording, "--folded", stacks)
    assert "withheld" in done.stderr
    assert "0.0 % matched" in done.stderr
    with open(stacks, "rb") as file:
        assert not any(name in line for line in file for name in functions)
    done = graft(recording, "--folded", stacks, "--force")
    assert "may be wrong" in done.stderr
    with open(stacks, "rb") as file:
        text = file.read()
    assert all(name in text for name in functions)


def is_under(stack: str, function: str) -> bool:
    """Whether the filter ran right under a Python frame of such a name."""
    frames = stack.split(";")
    if pyspy_match.UNCERTAIN in frames or pyspy_match.STACK_UNKNOWN in frames:
        return False
    python = [frame for frame in frames if frame_of(frame).kind == PYTHON]
    return "_phase_filter_[b]" in stack and function in python[-1]


@pytest.mark.parametrize("recording", NAMES, indirect=True)
def test_all_figures_are_printed(recording: Recording) -> None:
    done = graft(recording)
    assert done.exit_code == 0, done.output
    for word in ("samples a second", "held the process", "matched", "uncertain", "unknown"):
        assert word in done.stderr
    assert "self-check: " in done.stderr


@pytest.mark.parametrize("recording", ["phases-50"], indirect=True)
def test_every_sample_of_perf_is_in_every_output(recording: Recording) -> None:
    stacks, picture = recording.path("out.folded"), recording.path("out.svg")
    assert graft(recording, "--folded", stacks, "--svg", picture).exit_code == 0
    with open(recording.path("perf.txt"), "rb") as file:
        blocks = [block for block in file.read().split(b"\n\n") if b"cpu-clock: " in block]
    expected = sum(b" ptrace_stop+" not in block for block in blocks)
    with open(stacks, "rb") as file:
        assert sum(folded.parse(file).by_text().values()) == expected
    with open(recording.path("out.json"), encoding="utf-8") as file:
        document = json.load(file)
    merged, *threads = document["profiles"]
    assert sum(merged["weights"]) == expected
    assert sum(sum(thread["weights"]) for thread in threads) == expected
    files = {frame.get("file", "") for frame in document["shared"]["frames"]}
    assert {"/src/phases.py", "[kernel]", "[bpf]"} <= files
    with open(picture, encoding="utf-8") as file:
        drawn = file.read()
    for kind in ("Python", "kernel", "BPF", "unknown"):
        assert f">{kind} " in drawn


# What cannot be grafted


def refused(recording: Recording, *more: str) -> str:
    done = graft(recording, *more)
    assert done.exit_code == 1
    assert "Traceback" not in done.output
    return done.stderr


def edit(recording: Recording, name: str, old: bytes, new: bytes) -> None:
    with open(recording.path(name), "rb") as file:
        text = file.read()
    assert old in text
    with open(recording.path(name), "wb") as file:
        file.write(text.replace(old, new))


fifty = pytest.mark.parametrize("recording", ["phases-50"], indirect=True)


@fifty
def test_raw_format_is_refused(recording: Recording) -> None:
    with open(recording.path("pyspy.json"), "w", encoding="utf-8") as file:
        file.write("<module> (a.py:1);work (a.py:2) 17\n")
    assert "raw" in refused(recording)


@fifty
@pytest.mark.parametrize(
    ("file", "old", "new", "reason"),
    [
        ("pyspy.log", b"gil_only: false", b"gil_only: true", "--gil"),
        ("pyspy.log", b"Errors: 0", b"Errors: 30", "30 samples"),
        ("perf.txt", b"clockid = 1", b"clockid = 7", "-k CLOCK_MONOTONIC"),
        ("perf.txt", b"# event : ", b"# something: ", "--header"),
        ("session.json", b'"clocks"', b'"clock"', "no session"),
    ],
)
def test_what_cannot_be_matched_is_refused(
    recording: Recording, file: str, old: bytes, new: bytes, reason: str
) -> None:
    edit(recording, file, old, new)
    assert reason in refused(recording)


@fifty
def test_samples_without_a_log_are_refused(recording: Recording) -> None:
    with open(recording.path("pyspy.log"), "wb"):
        pass
    assert "RUST_LOG" in refused(recording)


@fifty
def test_that_there_are_no_frames_of_the_kernel_is_said(recording: Recording) -> None:
    assert "no sample of perf has kernel frames" not in graft(recording).stderr
    edit(recording, "perf.txt", b"\tffffffff", b"\t00000000")
    assert "no sample of perf has kernel frames" in graft(recording).stderr


@fifty
def test_a_thread_under_an_unknown_id_is_not_said_to_be_without_python(
    recording: Recording,
) -> None:
    with open(recording.path("truth.json"), encoding="utf-8") as file:
        tid = next(iter(json.load(file)))
    edit(recording, "pyspy.json", f"thread ({tid})".encode(), b"thread (4000000000)")
    stacks = recording.path("out.folded")
    assert "1 thread unknown" in graft(recording, "--folded", stacks).stderr
    with open(stacks, "rb") as file:
        counts = folded.parse(file).by_text()
    assert any(pyspy_match.STACK_UNKNOWN in stack for stack in counts)
    assert not any(pyspy_match.NO_PYTHON in stack for stack in counts)


@fifty
def test_few_errors_of_py_spy_cost_coverage(recording: Recording) -> None:
    before = graft(recording).stderr
    edit(recording, "pyspy.log", b"Errors: 0", b"Errors: 1")
    after = graft(recording).stderr
    assert "failed at 1 sample," in after
    assert matched(after) <= matched(before)


def matched(messages: str) -> float:
    return float(messages.partition(" % matched")[0].rpartition(" ")[2])


@fifty
def test_a_log_of_another_run_is_refused(recording: Recording) -> None:
    with open(recording.path("pyspy.log"), "rb") as file:
        lines = file.readlines()
    with open(recording.path("pyspy.log"), "wb") as file:
        file.writelines(lines[: len(lines) // 2])
    assert "differ in number" in refused(recording)


@fifty
def test_a_version_that_was_not_tried_is_named(recording: Recording) -> None:
    edit(recording, "pyspy.json", b"py-spy@0.4.3", b"py-spy@0.9.0")
    assert "0.9.0 is none of those tried" in graft(recording).stderr


@fifty
def test_a_clock_that_was_set_is_refused(recording: Recording) -> None:
    path = recording.path("session.json")
    with open(path, encoding="utf-8") as file:
        session = json.load(file)
    session["clocks"][1][0] += 200_000
    with open(path, "w", encoding="utf-8") as file:
        json.dump(session, file)
    assert "clock was set" in refused(recording)


@fifty
def test_without_a_session_perf_tells_the_clocks(recording: Recording, tmp_path: Path) -> None:
    (tmp_path / "session.json").unlink()
    assert "100.0 % of" in graft(recording).stderr
    edit(recording, "perf.txt", b"# reference time", b"# something else")
    assert "--header" in refused(recording)

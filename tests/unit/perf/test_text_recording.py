"""The shipped recording as text: annotate and fold beside the handler and the truth."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import demo
from tests.oracle import truth

REPO = Path(__file__).parents[3]
_FRAME = re.compile(r"\t *([0-9a-f]+) (\S+?)(?:\+0x[0-9a-f]+)? \((.*)\)")


def ksym(folder: Path, command: str, text: str, *words: str) -> tuple[str, str]:
    arguments = [sys.executable, "-m", "ksym_plugin.cli", command, "-H", str(folder / "ksym.db")]
    arguments += ["--clock", "perf"]  # The text has no header that tells it.
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [*arguments, *words],
        input=text.encode(),
        capture_output=True,
        env=environment,
        check=True,
        timeout=120,
    )
    return done.stdout.decode(), done.stderr.decode()


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, demo.Recording]:
    folder = tmp_path_factory.mktemp("recording")
    return folder, demo.shipped(str(folder))


@pytest.fixture(scope="module")
def annotated(recording: tuple[Path, demo.Recording]) -> tuple[str, str]:
    folder, recorded = recording
    return ksym(folder, "annotate", recorded.before)


def test_every_leaf_in_a_program_is_named_right(
    recording: tuple[Path, demo.Recording], annotated: tuple[str, str]
) -> None:
    _, recorded = recording
    before = truth.leaves(recorded.before, recorded.truth)
    after = truth.leaves(annotated[0], recorded.truth)
    assert before.wrong > 100
    assert len(after.verdicts) == len(before.verdicts)
    assert (after.wrong, after.missing) == (0, 0)


def test_frames_are_the_handler_s(
    recording: tuple[Path, demo.Recording], annotated: tuple[str, str]
) -> None:
    def bpf(text: str) -> list[tuple[str, str, str]]:
        frames = [match.groups() for match in map(_FRAME.match, text.split("\n")) if match]
        return [frame for frame in frames if frame[2] == "[bpf]"]

    _, recorded = recording
    assert len(bpf(recorded.after)) > 500
    assert bpf(annotated[0]) == bpf(recorded.after)
    for what in ("renamed (perf had them wrong)", "newly named (perf had missed them)"):
        number = re.search(rf"([\d,]+) {re.escape(what)}", recorded.tally)
        assert number is not None
        assert f" {number[0]}" in annotated[1]


def test_all_else_is_as_perf_printed_it(
    recording: tuple[Path, demo.Recording], annotated: tuple[str, str]
) -> None:
    before, after = recording[1].before.split("\n"), annotated[0].split("\n")
    assert len(before) == len(after)
    changed = [(one, other) for one, other in zip(before, after) if one != other]
    assert changed
    for one, other in changed:
        assert one[:17] == other[:17]
        assert other.endswith(" ([bpf])")


def test_microseconds_are_enough_where_programs_are_further_apart(
    recording: tuple[Path, demo.Recording], annotated: tuple[str, str]
) -> None:
    folder, recorded = recording
    cut = re.compile(r"(\d+\.\d{6})\d{3}:")
    out, _ = ksym(folder, "annotate", cut.sub(r"\1:", recorded.before))
    assert out == cut.sub(r"\1:", annotated[0])


def test_folding_repairs_first(
    recording: tuple[Path, demo.Recording], annotated: tuple[str, str]
) -> None:
    folder, recorded = recording
    at_once, _ = ksym(folder, "fold", recorded.before, "--bpf", "--all")
    after, _ = ksym(folder, "fold", annotated[0], "--bpf", "--all")
    assert at_once == after
    leaves: Counter[str] = Counter()
    for line in at_once.splitlines():
        stack, _, count = line.rpartition(" ")
        if stack.endswith("_[b]"):
            leaves[stack.rpartition(";")[2][:-4]] += int(count)
    named = truth.leaves(annotated[0], recorded.truth)
    samples = Counter(verdict.frame.name for verdict in named.verdicts)
    periods = {leaves[name] // samples[name] for name in samples}
    assert len(periods) == 1  # cpu-clock's samples all have the same period
    assert all(leaves[name] % samples[name] == 0 for name in samples)

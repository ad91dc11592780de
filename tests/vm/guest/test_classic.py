"""Classic BPF in stacks: no name of its own, and none of a neighbour's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ksym_plugin.timeline.symbols import AMONG_BPF, NOT_LOADED
from tests.oracle import procs, truth
from tests.vm.guest.around import CLI, SECONDS, Recorded

KINDS = ("socket", "seccomp")
#: The second where a program had the place before.
REASONS = {AMONG_BPF.text, NOT_LOADED.text}


@pytest.fixture(scope="module")
def recorded(workloads: Path) -> Recorded:
    return Recorded(workloads, "classic")


def test_the_filters_have_no_symbol(recorded: Recorded) -> None:
    for start, end in recorded.truth["classic"].values():
        assert end - start > 2_000
        assert not [at for at in recorded.truth["symbols"] if start <= at < end]


@pytest.mark.parametrize("kind", KINDS)
def test_a_filter_s_frames_are_bpf_s_and_nameless(recorded: Recorded, kind: str) -> None:
    frames = recorded.frames(*recorded.truth["classic"][kind])
    print(f"{len(frames)} frames in the {kind} filter")
    assert len(frames) > 10  # An emulated timer brings few on a busy machine.
    assert {(frame.name, frame.dso) for frame in frames} == {(truth.UNKNOWN, "[bpf]")}


def test_programs_beside_them_keep_their_names(recorded: Recorded) -> None:
    for start, end, name in recorded.truth["named"]:
        frames = recorded.frames(start, end)
        assert len(frames) > 10  # An emulated timer brings few on a busy machine.
        assert {(frame.name, frame.dso) for frame in frames} == {(name, "[bpf]")}


def test_they_are_counted_as_what_they_are(recorded: Recorded) -> None:
    found = [
        int(count.replace(",", ""))
        for why in REASONS
        for count in re.findall(rf"([\d,]+) unknown: {re.escape(why)}", recorded.said)
    ]
    frames = [recorded.frames(*recorded.truth["classic"][kind]) for kind in KINDS]
    assert sum(found) >= sum(map(len, frames)), recorded.said


def test_resolve_says_so(recorded: Recorded) -> None:
    addresses = [start + 64 for start, _ in recorded.truth["classic"].values()]
    answers = recorded.resolve(recorded.truth["during"], *addresses)
    assert [answer["name"] for answer in answers] == [None, None]
    assert {answer["reason"] for answer in answers} <= REASONS


def test_text_is_repaired_alike(recorded: Recorded, tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text(procs.run(recorded.script, SECONDS).out)
    words = [*CLI, "annotate", "-H", recorded.history, "--clock", "monotonic", str(plain)]
    text = procs.run(words, SECONDS).out
    start, end = recorded.truth["classic"]["socket"]
    leaves = [each.frames[0] for each in truth.samples(text) if each.frames]
    inside = {(leaf.name, leaf.dso) for leaf in leaves if start <= leaf.ip < end}
    assert inside == {(truth.UNKNOWN, "[bpf]")}

"""What the handler draws, fed with events as perf makes them."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from ksym_plugin.perf.pictures import SpeedscopeOutput, SvgOutput
from ksym_plugin.stacks.account import duration, lived, told
from ksym_plugin.timeline.symbols import BPF_MODULE, BPF_PROG, EXACT, Frame, Lifetime, Load
from tests.unit.helpers import BASE, load
from tests.unit.perf_events import CORE, SECOND, VMLINUX, event, node
from tests.unit.stacks.test_flamegraph import data_of, named

NAME = "bpf_prog_00000000000000aa_a"


def lifetime(prog_id: int | None = 7, pid: int | None = 12, comm: str | None = "agent") -> Lifetime:
    known = load(BASE, 64, NAME, SECOND, prog_id)
    life = Lifetime(Load(known.symbol, SECOND, SECOND, prog_id, False, pid, comm))
    life.unloaded_earliest = life.unloaded_latest = 4 * SECOND
    return life


def frame(known: Lifetime) -> Frame:
    return Frame(BASE + 4, NAME, 4, BPF_MODULE, BPF_PROG, EXACT, known)


def feed(output: SvgOutput, *samples: tuple[dict[str, Any], list[str]]) -> str:
    for one, pieces in samples:
        output.sample(one, pieces)
    output.close()
    return output._stream.getvalue()  # type: ignore[attr-defined]


def test_bpf_is_a_class_and_its_tooltip_tells_of_the_program() -> None:
    output = SvgOutput(io.StringIO(), "perf.data")
    core = output.kernel(CORE, "bpf_test_run", 4, VMLINUX)
    bpf = output.kernel(BASE + 4, NAME, 4, "[bpf]", frame(lifetime()))
    user = output.user(node(0x1000, "main", 4, "/x"))
    text = feed(output, (event(), [bpf, core, user]))
    data = data_of(text)
    classes = {name: rect.get("class")[:-1] for name, rect in named(text).items()}
    assert (classes[NAME], classes["bpf_test_run"], classes["main"]) == ("bpf", "kernel", "user")
    assert list(data["notes"].values()) == [["program 7, loaded by agent (pid 12), 3 s"]]


def test_bpf_frames_as_perf_had_them_are_bpf_s_too() -> None:
    output = SvgOutput(io.StringIO(), "x")
    assert output.kernel(BASE, NAME, 4, NAME) == f"{NAME}_[b]"
    assert output.kernel(BASE, "", None, "") == "[unknown]_[k]"
    assert output.kernel(BASE, "", None, "[bpf]") == "[bpf]_[b]"  # classic BPF has no name
    assert output.kernel(BASE, "nf_hook", 4, "[nf_tables]") == "nf_hook_[k]"


def test_many_programs_of_one_name() -> None:
    output = SvgOutput(io.StringIO(), "x")
    pieces = [output.kernel(BASE, NAME, 4, "[bpf]", frame(lifetime(number))) for number in range(9)]
    assert len(set(pieces)) == 1
    (lines,) = data_of(feed(output, (event(), pieces[:1])))["notes"].values()
    assert lines[0].startswith("program 0, ")
    assert lines[4:] == ["and 5 more of this name"]


def test_a_profile_a_thread_in_the_order_of_time() -> None:
    output = SpeedscopeOutput(io.StringIO(), "perf.data")
    samples = [
        (event(tid=tid, comm=comm), [piece])
        for tid, comm, piece in [(8, "b", "x"), (8, "b", "x"), (9, "a", "x"), (8, "b", "w")]
    ]
    document = json.loads(feed(output, *samples))
    names = [frame["name"] for frame in document["shared"]["frames"]]
    found = {
        profile["name"]: [
            (";".join(names[at] for at in sample), weight)
            for sample, weight in zip(profile["samples"], profile["weights"])
        ]
        for profile in document["profiles"]
    }
    assert found == {
        "all threads, merged": [("a;x", 1), ("b;w", 1), ("b;x", 2)],
        "a 9": [("a;x", 1)],
        "b 8": [("b;x", 2), ("b;w", 1)],
    }
    assert next(iter(found)) == "all threads, merged"


def test_without_samples_there_is_still_a_picture() -> None:
    assert ET.fromstring(feed(SvgOutput(io.StringIO(), "x"))).get("class") == "flame"


# Words


def test_what_is_not_known_is_not_told() -> None:
    assert told(lifetime(None, None, None)) == "program unknown, 3 s"
    assert told(lifetime(7, 12, None)) == "program 7, loaded by ? (pid 12), 3 s"


@pytest.mark.parametrize(
    "least, most, text",
    [
        (None, None, "still loaded"),
        (3 * SECOND, None, "over 3 s"),
        (3 * SECOND, 3 * SECOND, "3 s"),
        (SECOND, 90 * SECOND, "1 s to 1.5 min"),
        (0, SECOND, "under 1 s"),
    ],
)
def test_lived(least: int | None, most: int | None, text: str) -> None:
    assert lived(least, most) == text


@pytest.mark.parametrize(
    "nanoseconds, text",
    [(5, "5 ns"), (83_200_000, "83.2 ms"), (1500, "1.5 µs"), (5400 * SECOND, "1.5 h")],
)
def test_duration(nanoseconds: int, text: str) -> None:
    assert duration(nanoseconds) == text

"""Folded stacks, pictures and their words, fed with events as perf makes them."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.perf.stack_output import (
    FoldedOutput,
    ReportOutput,
    SpeedscopeOutput,
    SvgOutput,
    TextStacks,
)
from ksym_plugin.stacks.account import describe, duration, lived
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.resolver import Locator
from ksym_plugin.timeline.symbols import BPF_MODULE, BPF_PROG, EXACT, Frame, Lifetime, Load
from tests.unit.helpers import BASE, load
from tests.unit.perf_events import CORE, SECOND, VMLINUX, event, node
from tests.unit.stacks.test_flamegraph import data_of, named
from tests.unit.texts import A, B, Lines, one_place, renamer

NAME = "bpf_prog_00000000000000aa_a"


def lifetime(prog_id: int | None = 7, pid: int | None = 12, comm: str | None = "agent") -> Lifetime:
    known = load(BASE, 64, NAME, SECOND, prog_id)
    life = Lifetime(Load(known.symbol, SECOND, SECOND, prog_id, False, pid, comm))
    life.unloaded_earliest = life.unloaded_latest = 4 * SECOND
    return life


def frame(known: Lifetime) -> Frame:
    return Frame(BASE + 4, NAME, 4, BPF_MODULE, BPF_PROG, EXACT, known)


def feed(output: SvgOutput, *samples: tuple[dict[str, Any], list[int]]) -> str:
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
    pieces = [
        output.kernel(BASE, NAME, 4, NAME),
        output.kernel(BASE, "", None, ""),
        output.kernel(BASE, "", None, "[bpf]"),  # classic BPF has no name
        output.kernel(BASE, "nf_hook", 4, "[nf_tables]"),
    ]
    found = named(feed(output, (event(), pieces)))
    classes = {name: rect.get("class")[:-1] for name, rect in found.items()}
    assert {"[unknown]", "nf_hook"} == {n for n, kind in classes.items() if kind == "kernel"}
    assert {NAME, "[[bpf]]"} == {n for n, kind in classes.items() if kind == "bpf"}


@pytest.mark.parametrize("name", ["bpf_prog_00000000000000aa", "bpf_trampoline_6442"])
def test_a_name_that_is_marked_is_bpf_s_as_before(name: str) -> None:
    output = SvgOutput(io.StringIO(), "x")
    found = named(feed(output, (event(), [output.kernel(BASE, name + "?", 4, name)])))
    assert found[name + "?"].get("class")[:-1] == "bpf"
    stream = io.StringIO()
    report = ReportOutput(stream)
    report.sample(event(), [report.kernel(BASE, name + "?", 4, name)])
    report.close()
    (cycles,) = json.loads(stream.getvalue())
    assert [row["own"]["samples"] for row in cycles["programs"]] == [1]


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
        (event(tid=tid, comm=comm), [output.user(node(1, name))])
        for tid, comm, name in [(8, "b", "x"), (8, "b", "x"), (9, "a", "x"), (8, "b", "w")]
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


def test_a_picture_is_of_one_event(capsys: pytest.CaptureFixture[str]) -> None:
    few = event(node(1, "x"), ev_name="page-faults")
    few["sample"]["period"] = 7
    many = event(node(1, "y"))
    for chosen, weight, unit in (
        (None, "samples", "2 samples"),
        ("page-faults", "samples", "1 sample"),
        ("page-faults", "period", "7 page-faults"),
    ):
        output = SvgOutput(io.StringIO(), "perf.data", chosen, weight)
        samples = [(one, [output.user(one["callchain"][0])]) for one in (few, many, many)]
        text = feed(output, *samples)
        counted, other = ("cpu-clock", "page-faults")[:: -1 if chosen else 1]
        assert f">perf.data: {counted}<" in text
        assert f">{unit}<" in text
        assert ("x" in named(text), "y" in named(text)) == (bool(chosen), not chosen)
        assert f"only {counted} (" in (said := capsys.readouterr().err)
        assert f"another: {other} (" in said
    absent = FoldedOutput(io.StringIO(), event="cycles")
    absent.sample(few, [absent.user(few["callchain"][0])])
    with pytest.raises(KsymError, match="of the event cycles; take one of: page-faults"):
        absent.close()


TEXT = b"""\
b 8 [000] 5.500000: 3 cycles:
\tffffffffc0001004 [unknown] ([unknown])
\tffffffff81000404 alpha+0x4 ([kernel.kallsyms])
\tffffffff81000504 [unknown] ([kernel.kallsyms])
\t          401000 main+0x4 (/bin/x)

b 8 [000] 6.500000: 3 cycles:
\tffffffffc0001004 [unknown] ([unknown])
  file.c:2
\t          401000 [unknown] (/bin/x)

b 8 [000] 6.600000: 3 faults:
\t          401000 [unknown] (/bin/x)

"""


def test_text_is_counted_as_perf_s_samples_are() -> None:
    stream = io.StringIO()
    reader = TextStacks(renamer(one_place()), FoldedOutput(stream, weight="period"), None)
    for at in range(0, len(TEXT), 100):
        reader.read(TEXT[at : at + 100])
    reader.end()
    assert stream.getvalue().splitlines() == [
        f"b;[x];{B}_[k] 3",
        f"b;main;[[kernel.kallsyms]]_[k];alpha_[k];{A}_[k] 3",
    ]


def test_text_tells_source_lines_and_threads() -> None:
    stream = io.StringIO()
    output = SpeedscopeOutput(stream, "x")
    reader = TextStacks(renamer(one_place()), output, Locator(Lines(), Lines()))
    reader.read(TEXT)
    reader.end()
    document = json.loads(stream.getvalue())
    assert [profile["name"] for profile in document["profiles"]] == ["all threads, merged", "b 8"]
    lines = {frame["name"]: frame.get("line") for frame in document["shared"]["frames"]}
    assert lines == {"b": None, "main": None, "[[kernel.kallsyms]]": None} | {
        "[x]": None,
        "alpha": 0x403,
        A: 4,
        B: 4,
    }


def test_text_is_accounted_by_program() -> None:
    stream = io.StringIO()
    reader = TextStacks(renamer(one_place()), ReportOutput(stream), None)
    reader.read(TEXT)
    reader.end()
    cycles, faults = json.loads(stream.getvalue())
    assert (cycles["event"], cycles["samples"], cycles["kernel_samples"]) == ("cycles", 2, 2)
    assert [(row["name"], row["own"]["samples"]) for row in cycles["programs"]] == [(A, 1), (B, 1)]
    assert (faults["event"], faults["samples"], faults["kernel_samples"]) == ("faults", 1, 0)


def test_without_samples_there_is_still_a_picture() -> None:
    assert ET.fromstring(feed(SvgOutput(io.StringIO(), "x"))).get("class") == "flame"


# Folded stacks


def folded(*events: dict[str, Any]) -> list[str]:
    stream = io.StringIO()
    output = FoldedOutput(stream)
    for one in events:
        output.sample(one, [output.user(entry) for entry in one["callchain"]])
    output.close()
    return stream.getvalue().splitlines()


def test_semicolons_of_java_do_not_make_frames() -> None:
    name = "Ldemo/io/Out;::write->Ldemo/Enc;::enc"
    one = event(node(0x7F72_2D11_9786, name, 0x4B, "/tmp/perf-19982.map"))
    assert folded(one) == ["demo;Ldemo/io/Out:::write->Ldemo/Enc:::enc 1"]


def test_equal_stacks_are_counted() -> None:
    one, other = event(node(1, "a"), node(2, "b")), event(node(2, "b"))
    assert folded(one, other, one, one) == ["demo;b 1", "demo;b;a 3"]


@pytest.mark.parametrize(
    "dso, frame",
    [
        ("/usr/lib/libc.so.6", "[libc.so.6]"),
        ("[vdso]", "[[vdso]]"),
        ("[kernel.kallsyms]", "[[kernel.kallsyms]]"),
        ("", "[unknown]"),
        (None, "[unknown]"),
        ("/x/a;b\nc", "[a:b c]"),
    ],
)
def test_a_frame_without_a_name_is_its_file(dso: str | None, frame: str) -> None:
    assert folded(event(node(1, dso=dso))) == [f"demo;{frame} 1"]


def test_kernel_frames_are_marked() -> None:
    output = FoldedOutput(io.StringIO())
    dsos = (("f;g", "[kernel.kallsyms]"), ("", "[kernel.kallsyms]"), ("", ""))
    output.sample(event(), [output.kernel(1, name, None, dso) for name, dso in dsos])
    output.close()
    assert output._stream.getvalue() == (  # type: ignore[attr-defined]
        "demo;[unknown]_[k];[[kernel.kallsyms]]_[k];f:g_[k] 1\n"
    )


@given(st.lists(st.tuples(st.text(max_size=6), st.lists(st.text(max_size=6), max_size=4))))
def test_a_folded_line_has_as_many_frames_as_its_stack(stacks: list[tuple[str, list[str]]]) -> None:
    samples = [
        event(*[node(at, name, 0, "/x") for at, name in enumerate(names)], comm=comm)
        for comm, names in stacks
    ]
    lines = folded(*samples)
    total = 0
    for line in lines:
        stack, _, count = line.rpartition(" ")
        assert stack.count(";") in {len(names) for _, names in stacks}
        total += int(count)
    assert total == len(samples)


# Words


def test_what_is_not_known_is_not_told() -> None:
    assert describe(lifetime(None, None, None)) == "program unknown, 3 s"
    assert describe(lifetime(7, 12, None)) == "program 7, loaded by ? (pid 12), 3 s"


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

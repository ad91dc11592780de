"""Source lines in all that the handler prints, over a history that has line tables."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel.clocks import MONOTONIC
from ksym_plugin.perf import fold, text
from ksym_plugin.perf.handler import Handler, Options
from ksym_plugin.perf.output import TextOutput
from ksym_plugin.perf.repaint import Annotator, Renamer
from ksym_plugin.perf.stack_output import FoldedOutput, SvgOutput
from ksym_plugin.timeline.program import ProgramDetails, pack_lines
from ksym_plugin.timeline.symbols import (
    BPF_MODULE,
    BPF_PROG,
    EXACT,
    Frame,
    Lifetime,
    SourceLocation,
)
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import BASE, load, unload
from tests.unit.perf_events import CALLCHAIN, CORE, SAMPLED, SECOND, VMLINUX, attr, event, node
from tests.unit.stacks.test_flamegraph import HOSTILE, data_of
from tests.unit.stacks.test_speedscope import check

MAIN, SUB = "bpf_prog_00000000000000aa_main", "bpf_prog_00000000000000bb_sub"
TRAMPOLINE = "bpf_trampoline_6442467359"
SUB_AT, TRAMPOLINE_AT = BASE + 0x100, BASE + 0x2000
FILE, HEADER = "/src/prog.c", "/src/lib/helpers.h"
CALL, AFTER, LOOP = "\tx = sub(x);", "\treturn x;", "  for (;;)  x <<= 1;"
#: Each function's rows: offset, line, file and text.
ROWS = [
    [(0, 10, FILE, CALL), (8, 11, FILE, AFTER)],
    [(0, 3, HEADER, LOOP), (16, 4, FILE, "}")],
]
#: What the call in MAIN returns to: the next line's first instruction.
RETURN = BASE + 8
HOUR = 3600 * SECOND


def write(path: str, rows: list = ROWS, target: str = "tcp_connect") -> str:
    """MAIN and SUB are one program, there for the first ten seconds; a trampoline stays."""
    writer = HistoryWriter(path, "test", 0, None)
    timeline = Timeline()
    changes = [
        load(BASE, 64, MAIN, SECOND, 7),
        load(SUB_AT, 64, SUB, SECOND, 7),
        load(TRAMPOLINE_AT, 0x1000, TRAMPOLINE, SECOND, open_ended=True),
        unload(BASE, 10 * SECOND, MAIN, 7),
        unload(SUB_AT, 10 * SECOND, SUB, 7),
    ]
    known = ProgramDetails(7, "")
    known.tag, known.type = "00000000000000aa", 1
    known.functions = [(BASE, 64, MAIN), (SUB_AT, 64, SUB)]
    known.lines, known.digest = pack_lines(rows), b"d" * 8
    known.trampoline, known.target = 6442467359, target
    for change in changes:
        lifetime = timeline.apply(change)
        assert lifetime is not None
        writer.note(lifetime)
    writer.note_program(known)
    writer.close(HOUR)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(str(tmp_path_factory.mktemp("lines") / "h.db"))


@pytest.fixture
def run(path: str, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    def runner(form: str, *events: dict, lines: bool = False, history: str = path) -> str:
        options = Options(history, MONOTONIC, form)
        options.lines = lines
        handler = Handler(options, None)
        for one in events:
            handler.process_event(one)
        handler.trace_end()
        out, err = capsys.readouterr()
        assert "samples" not in err, err
        return out

    return runner


def known(file: str = "", line: int = 0, words: str = "", traced: str | None = None) -> Frame:
    """A frame of MAIN with a source location, or with what it traces."""
    location = SourceLocation(file, line, words)
    frame = Frame(BASE, MAIN, 4, BPF_MODULE, BPF_PROG, EXACT, None, location)
    return frame if traced is None else frame.tracing(traced)


def at(seconds: float, *addresses: int) -> dict:
    """A sample whose frames perf could not name, before a kernel function and a user's."""
    chain = [node(address) for address in addresses]
    chain += [node(CORE + 4, "bpf_test_run", 4, VMLINUX), node(0x4010, "main", 4, "/x/a")]
    return event(*chain, time=int(seconds * SECOND))


def sources(out: str) -> list[str]:
    """The lines below each frame of a text, empty where there is none."""
    found: list[str] = []
    for line in out.splitlines():
        if line.startswith("\t"):
            found.append("")
        elif line.startswith("  "):
            found[-1] += line[2:]
    return found


# Text


def test_a_leaf_is_where_it_is_and_a_caller_where_it_called(run) -> None:
    out = run("text", at(5, SUB_AT + 16, RETURN), lines=True)
    assert sources(out) == ["prog.c:4", "prog.c:10", "", ""]
    assert f"\t{SUB_AT + 16:16x} {SUB}+0x10 ([bpf])\n  prog.c:4\n" in out


def test_an_address_that_comes_again_is_not_taken_for_the_other(run) -> None:
    leaf, caller = at(5, RETURN), at(6, SUB_AT, RETURN)
    out = run("text", *[leaf, caller] * 4, at(7, RETURN, RETURN), lines=True)
    assert [line for line in sources(out) if line] == [
        *["prog.c:11", "helpers.h:3", "prog.c:10"] * 4,
        *("prog.c:11", "prog.c:10"),
    ]


def test_after_the_unload_there_are_lines_too(run) -> None:
    assert sources(run("text", *[at(11, SUB_AT)] * 3, lines=True))[::3] == ["helpers.h:3"] * 3


def test_what_is_not_asked_for_is_not_told(run) -> None:
    samples = [at(5, SUB_AT + 16, RETURN), at(5, TRAMPOLINE_AT + 4)]
    plain, lined = run("text", *samples), run("text", *samples, lines=True)
    assert sources(plain) == [""] * 7
    assert "".join(line for line in lined.splitlines(True) if line[:2] != "  ") == plain
    assert "prog.c" not in run("folded", *samples)


def test_a_trampoline_says_what_it_traces(run) -> None:
    out = run("text", at(5, SUB_AT, TRAMPOLINE_AT + 0x20), lines=True)
    assert f" {TRAMPOLINE}+0x20 ([bpf])\n  traces tcp_connect\n" in out


def test_a_sample_without_a_callchain(run) -> None:
    plain = attr(sample_type=SAMPLED & ~CALLCHAIN)
    out = run("text", event(time=5 * SECOND, ip=RETURN, attr=plain), lines=True)
    assert out.endswith(f" {MAIN}+0x8 ([bpf])\n  prog.c:11\n")


def test_folded_stacks_have_lines_if_asked(run) -> None:
    out = run("folded", *[at(5, SUB_AT + 16, RETURN)] * 2, lines=True)
    assert out == f"demo;main;bpf_test_run_[k];{MAIN}:prog.c:10_[k];{SUB}:prog.c:4_[k] 2\n"


NASTY = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            *HOSTILE,
            "x 123 1.500000: cycles:",
            "ffffffff81000404 spoof (x)",
            "a b.c\n\tffffffff81000404 spoof+0x4 ([kernel.kallsyms])",
            "evil.c:1\nbad 12 [000] 1.5: cycles:",
        ]
    ),
)


@settings(max_examples=200)
@given(NASTY, st.integers(1, 1 << 22), NASTY, st.booleans(), st.booleans())
def test_readers_of_perf_s_text_see_no_more_than_without(
    file: str, line: int, words: str, traced: bool, is_first: bool
) -> None:
    frame = known(traced=words) if traced else known(file, line, words)
    printed = []
    for told in (None, frame):
        stream = io.StringIO()
        output = TextOutput(stream)
        frames = [output.kernel(BASE, MAIN, 4, "[bpf]", told), output.kernel(CORE, "f", 0, "[k]")]
        output.sample(event(node(BASE), node(CORE)), frames if is_first else frames[::-1])
        output.sample(event(node(CORE)), frames[1:])
        output.close()
        printed.append(stream.getvalue().encode("utf-8", "surrogatepass"))
    plain, lined = printed
    assert [text.parse(one, False) is None for one in lined.splitlines() if one[:2] == b"  "] in (
        [True],
        [],
    )
    assert folded(lined) == folded(plain)
    renamer = Renamer()
    annotator = Annotator(renamer)
    assert annotator.feed(lined) + annotator.close() == lined
    assert renamer.tally.unparsed == 0


def folded(printed: bytes) -> list[bytes]:
    folder = fold.Folder(fold.FoldOptions())
    folder.read(printed)
    folder.end()
    assert folder.sums.unparsed == 0
    return list(folder.sums.lines(b"cpu-clock"))


@settings(max_examples=50)
@given(NASTY, st.integers(1, 1 << 22))
def test_folded_stacks_are_split_by_no_file(file: str, line: int) -> None:
    stream = io.StringIO()
    output = FoldedOutput(stream)
    output.sample(event(node(BASE)), [output.kernel(BASE, MAIN, 4, "[bpf]", known(file, line))])
    output.close()
    (stack,) = stream.getvalue().split("\n")[:-1]
    assert stack.count(";") == 1 and stack.endswith("_[k] 1")


def test_a_name_that_no_file_can_have_is_cut() -> None:
    stream = io.StringIO()
    printed = TextOutput(stream).kernel(BASE, MAIN, 4, "[bpf]", known("/src/" + "x" * 5000, 7))
    assert printed.endswith("\n  " + "x" * 255 + ":7\n")


def test_a_terminal_gets_lines_without_control_characters() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    output = TextOutput(stream)
    piece = output.kernel(BASE, "a\x1b[31mb", 4, "d\x07", known("/x/\x1b]0;y.c", 7))
    output.sample(event(node(BASE)), [piece])
    output.close()
    assert stream.getvalue().splitlines()[1:] == [
        f"\t{BASE:16x} a[31mb+0x4 (d)",
        "  _]0;y.c:7",
        "",
    ]


# Pictures


def profile() -> list[dict]:
    """SUB 8 times at its loop, 2 times at its end; MAIN 10 times at the call, once after."""
    deep = [at(5, SUB_AT + 4, RETURN)] * 8 + [at(5, SUB_AT + 20, RETURN)] * 2
    return [*deep, at(6, RETURN), at(6, TRAMPOLINE_AT + 4), at(6)]


def notes_of(out: str) -> dict[str, list[str]]:
    data = data_of(out)
    return {data["names"][int(at)]: lines for at, lines in data["notes"].items()}


def test_a_tooltip_has_the_hottest_lines(run) -> None:
    notes = notes_of(run("svg", *profile()))
    assert notes[SUB] == [
        "program 7, 9 s",
        "helpers.h:3   80 %  for (;;) x <<= 1;",
        "prog.c:4      20 %  }",
    ]
    assert notes[MAIN][1:] == ["prog.c:10   91 %  x = sub(x);", "prog.c:11    9 %  return x;"]
    assert notes[TRAMPOLINE][1:] == ["traces tcp_connect"]
    assert "bpf_test_run" not in notes


def test_a_picture_s_stacks_are_those_without_lines(run) -> None:
    data = data_of(run("svg", *profile()))
    assert data["boxes"][2] == 13
    assert len(data["names"]) == len(set(data["names"])) == 7
    assert not any("\x1f" in name for name in data["names"])


def test_a_tooltip_tells_five_lines_and_how_many_more() -> None:
    output = SvgOutput(io.StringIO(), "x")
    for line in range(1, 9):
        piece = output.kernel(BASE, MAIN, 4, "[bpf]", known("a.c", line))
        for _ in range(line):
            output.sample(event(node(BASE)), [piece])
    output.close()
    (lines,) = notes_of(output._stream.getvalue()).values()  # type: ignore[attr-defined]
    assert lines == [
        *("a.c:8   22 %", "a.c:7   19 %", "a.c:6   17 %", "a.c:5   14 %", "a.c:4   11 %"),
        "and 3 more lines",
    ]


def test_in_a_recursion_a_sample_counts_once_for_a_line() -> None:
    output = SvgOutput(io.StringIO(), "x")
    one, other = (output.kernel(BASE, MAIN, 4, "[bpf]", known("a.c", n)) for n in (1, 2))
    output.sample(event(node(BASE)), [one, other, other])
    output.sample(event(node(BASE)), [one, one])
    output.close()
    (lines,) = notes_of(output._stream.getvalue()).values()  # type: ignore[attr-defined]
    assert lines == ["a.c:1  100 %", "a.c:2   50 %"]


def test_hostile_files_and_texts_in_a_picture() -> None:
    output = SvgOutput(io.StringIO(), "x")
    for number, name in enumerate(HOSTILE):
        frames = (known(name, 1, name), known(traced=name))
        pieces = [output.kernel(BASE, f"{MAIN}{number}", 4, "[bpf]", frame) for frame in frames]
        output.sample(event(node(BASE)), pieces)
    output.close()
    out = output._stream.getvalue()  # type: ignore[attr-defined]
    root = ET.fromstring(out)
    assert {element.tag.rpartition("}")[2] for element in root.iter()} == {
        *("svg", "title", "style", "text", "g", "rect", "metadata", "script")
    }
    for lines in notes_of(out).values():
        assert all(line.isprintable() and len(line) <= 700 for line in lines)
    assert out.count("<script") == 1


def test_speedscope_has_a_function_s_hottest_line(run) -> None:
    document = json.loads(run("speedscope", *profile()))
    check(document)
    frames = {frame["name"]: frame for frame in document["shared"]["frames"]}
    assert frames[SUB] == {"name": SUB, "file": HEADER, "line": 3}
    assert frames[MAIN] == {"name": MAIN, "file": FILE, "line": 10}
    assert frames[TRAMPOLINE] == {"name": TRAMPOLINE, "file": "[bpf]"}
    assert len(frames) == len(document["shared"]["frames"])
    merged, thread = document["profiles"]
    assert sum(merged["weights"]) == sum(thread["weights"]) == 13
    # Equal neighbours are one, at whatever line they were.
    assert thread["weights"][0] == 10


# The account


def test_a_program_s_lines_are_counted(run) -> None:
    (document,) = json.loads(run("report", *profile()))
    rows = {row["name"]: row for row in document["programs"]}
    assert rows[MAIN]["lines"] == [
        {"file": HEADER, "line": 3, "text": LOOP, "samples": 8, "own": 8},
        {"file": FILE, "line": 4, "text": "}", "samples": 2, "own": 2},
        {"file": FILE, "line": 11, "text": AFTER, "samples": 1, "own": 1},
    ]
    assert rows[TRAMPOLINE]["traces"] == "tcp_connect"
    assert (rows[MAIN]["traces"], rows[TRAMPOLINE]["lines"]) == (None, [])


def test_a_sample_in_a_helper_counts_for_the_line_that_called_it(run) -> None:
    helper = event(
        node(CORE + 4, "bpf_helper", 4, VMLINUX), node(RETURN), time=5 * SECOND, comm="x"
    )
    (document,) = json.loads(run("report", helper, helper))
    (row,) = document["programs"]
    assert row["lines"] == [{"file": FILE, "line": 10, "text": CALL, "samples": 2, "own": 0}]


def test_the_live_system_s_lines(
    run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ksym_plugin.kernel import bpf_prog, snapshot

    class Lines:
        def line(self, lifetime: Lifetime, offset: int, /) -> SourceLocation:
            return SourceLocation("live.c", offset)

        def program_name(self, lifetime: Lifetime, /) -> None:
            return None

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KSYM_HISTORY", raising=False)
    monkeypatch.setattr("ksym_plugin.history.locate.SYSTEM", str(tmp_path / "none.db"))
    monkeypatch.setattr(bpf_prog, "LiveLines", Lines)
    taken = snapshot.Snapshot([load(BASE, 64, MAIN, SECOND, 7)], "")
    monkeypatch.setattr(snapshot, "take", lambda: taken)
    out = run("text", at(5, BASE + 8, BASE + 8), lines=True, history=None)
    assert sources(out)[:2] == ["live.c:8", "live.c:7"]

"""Whatever an event holds, nothing is raised into perf, which would abort."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksym_plugin.perf.handler import Handler, Options
from tests.unit.helpers import BASE, load
from tests.unit.history.test_history import record
from tests.unit.perf_events import CORE, SECOND, VMLINUX, bpf, event, node

A = "bpf_prog_00000000000000aa_a"
FORMS = ("text", "folded")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("hostile") / "h.db")
    record(path, [load(BASE, 64, A, SECOND)], covered=3600 * SECOND)
    return path


class Stream(io.TextIOWrapper):
    """A stream as perf's interpreter has it, kept in memory."""

    def __init__(self, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="surrogateescape", newline="\n")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def read_all(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode("utf-8", "surrogateescape")  # type: ignore[attr-defined]


def handle(path: str, form: str, events: list[Any], is_terminal: bool = False) -> tuple[str, str]:
    """What is printed, and what is said, of events that are fed to a handler."""
    out, err = Stream(is_terminal), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        handler = Handler(Options(path, "monotonic", form), None)
        for one in events:
            handler.process_event(one)
        handler.trace_end()
    return out.read_all(), err.getvalue()


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([CORE, BASE + 8, 1 << 63, (1 << 64) - 32, 1 << 64, -1, 10**30])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "a;b\n", "\x1b[2J", "[guest.x]", VMLINUX])
    | st.binary(max_size=8)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.sampled_from(["ip", "sym", "name", "start", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def or_anything(right: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return right | right | right | ANYTHING


SYMBOLS = st.fixed_dictionaries(
    {}, optional={key: or_anything(st.just(value)) for key, value in node(8, "f")["sym"].items()}
)
NODES = st.fixed_dictionaries(
    {},
    optional={
        "ip": or_anything(st.sampled_from([CORE, BASE + 8, 0x1000])),
        "sym": or_anything(SYMBOLS),
        "sym_off": or_anything(st.integers(0, 64)),
        "dso": or_anything(st.sampled_from([VMLINUX, A, "/x/a"])),
    },
)
SAMPLES = st.fixed_dictionaries(
    {}, optional={key: or_anything(st.just(value)) for key, value in event()["sample"].items()}
)
EVENTS = st.fixed_dictionaries(
    {},
    optional={
        "sample": or_anything(SAMPLES),
        "callchain": or_anything(st.lists(or_anything(NODES), max_size=4)),
        **{
            key: or_anything(st.just(event()[key]))
            for key in ("attr", "comm", "ev_name", "brstack")
        },
        **dict.fromkeys(("symbol", "symoff", "dso", "map_pgoff"), ANYTHING),
    },
)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events=st.lists(EVENTS | ANYTHING, max_size=4), is_terminal=st.booleans())
def test_no_event_raises(path: str, form: str, events: list[Any], is_terminal: bool) -> None:
    good = event(bpf(BASE + 8, A, 8), time=5 * SECOND)
    # More than of any other event, so that stacks are counted of this one.
    text, said = handle(path, form, [*events, *[good] * 5], is_terminal)
    # And whatever came before, a good sample is still right.
    wanted = f"demo;{A}_[k] " if form == "folded" else f"\t{BASE + 8:x} {A}+0x8 ([bpf])\n"
    assert wanted in text
    assert " kernel frames: " in said


@pytest.mark.parametrize("form", FORMS)
def test_an_event_that_contains_itself(path: str, form: str) -> None:
    one = event(bpf(BASE + 8, A, 8), time=5 * SECOND)
    one["callchain"].append(one)
    one["sample"]["values"] = one
    text, said = handle(path, form, [one])
    assert A in text
    assert "1 samples passed on as perf had them: KeyError: 'ip'" in said
    assert "1 samples cut short" in said


def test_what_could_be_read_is_passed_on(path: str) -> None:
    frames = [node(CORE, "f", 0, VMLINUX), {"ip": "x"}]
    text, said = handle(path, "text", [event(*frames), "no event", None])
    assert f"\t{CORE:16x} f+0x0 ({VMLINUX})\n" in text
    assert text.count("demo") == 1
    assert said.count("1 samples left out: AttributeError: ") == 2


def test_the_tally_of_errors_is_bounded(path: str) -> None:
    events = [event(node(0x10), time=f"{at} {'x' * 500}") for at in range(200)]
    _, said = handle(path, "text", events)
    assert "1 samples left out: ValueError: " in said
    assert " samples left out: other errors\n" in said
    assert len(said.splitlines()) < 30
    assert max(map(len, said.splitlines())) < 200


@pytest.mark.parametrize("form", FORMS)
def test_half_a_surrogate_pair_is_escaped(path: str, form: str) -> None:
    text, _ = handle(path, form, [event(comm="a\ud800b"), event(node(0x10, "good"))])
    assert "a\\ud800b" in text
    assert "good" in text


ESCAPE = "\x1b]0;owned\x07\x9b2J\x7f"


def hostile_names() -> dict[str, Any]:
    chain = (
        node(CORE, f"f{ESCAPE}\nfake 1 2.0: 1 x:", 0, VMLINUX),
        node(0x10, f"u{ESCAPE}\r", 4, f"/x{ESCAPE}\n/y"),
        node(0x20, dso=f"/x{ESCAPE}\n/z"),
    )
    return event(*chain, comm=f"c{ESCAPE}\nd", ev_name="e\x1b[1m", time=5 * SECOND)


def controls(text: str) -> set[str]:
    return {char for char in text if not char.isprintable()}


def test_names_reach_a_file_as_they_are(path: str) -> None:
    text, _ = handle(path, "text", [hostile_names()])
    assert text.startswith(f"c{ESCAPE}\nd ")
    assert f"\t{CORE:16x} f{ESCAPE}\nfake 1 2.0: 1 x:+0x0 ({VMLINUX})\n" in text


def test_names_reach_a_terminal_without_control_characters(path: str) -> None:
    text, _ = handle(path, "text", [hostile_names()], is_terminal=True)
    assert controls(text) == {"\n", "\t"}
    # One line a frame and one for the header, and the empty one at the end.
    assert len(text.splitlines()) == 5
    assert text.startswith("c]0;owned2Jd ")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_folded_stack_is_one_line(path: str, is_terminal: bool) -> None:
    text, _ = handle(path, "folded", [hostile_names()], is_terminal)
    assert controls(text) == {"\n"}
    (line,) = text.splitlines()
    assert line.count(";") == 3
    assert line.endswith("_[k] 1")


def test_bytes_that_are_no_utf_8_pass_through(path: str) -> None:
    raw = "caf\udcc3"
    text, _ = handle(path, "text", [event(node(0x10, raw, 4, f"/x/p{raw}"), comm=raw)])
    assert text.encode("utf-8", "surrogateescape").count(b"caf\xc3") == 3


def test_what_is_said_has_no_control_characters(path: str) -> None:
    _, said = handle(path, "text", [{"sample": {"\x1b[2J\n": 1}, "callchain": [{"\x9b\n": 1}]}])
    assert controls(said) == {"\n"}


class Full(io.RawIOBase):
    """A disk without room."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, _: Any) -> int:
        raise OSError(28, os.strerror(28))


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_is_said_and_perf_goes_on(path: str, form: str, tmp_path: Path) -> None:
    err = io.StringIO()
    with open(tmp_path / "out", "wb") as file, pytest.MonkeyPatch.context() as patch:
        stream = io.TextIOWrapper(io.BufferedWriter(Full(file.fileno())), encoding="utf-8")
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", err)
        handler = Handler(Options(path, "monotonic", form), None)
        for number in range(3000):
            handler.process_event(event(bpf(BASE + 8, A, 8), time=5 * SECOND, comm=str(number)))
        handler.trace_end()
        # What is left in the buffer cannot be written either: not when it is collected.
        stream.detach().raw.__dict__["write"] = len
    assert "the output cannot be written (No space left on device)" in err.getvalue()
    assert "3,000 kernel frames: 3,000 confirmed" in err.getvalue()


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_without_stderr_nothing_is_said(path: str, stderr: str | None) -> None:
    closed = io.StringIO()
    closed.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Stream())
        patch.setattr(sys, "stderr", closed if stderr else None)
        handler = Handler(Options(path, "monotonic", "text"), None)
        handler.process_event(None)  # type: ignore[arg-type]
        handler.trace_end()

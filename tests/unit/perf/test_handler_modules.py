"""Frames in modules: perf's name against what the history has of the module at that time."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksym_plugin.history.reader import History
from ksym_plugin.kernel.clocks import MONOTONIC
from ksym_plugin.perf.handler import Handler, Options
from ksym_plugin.perf.namer import Tally, is_module, weigh
from ksym_plugin.perf.repaint import Renamer
from ksym_plugin.perf.repair import Repairer
from ksym_plugin.timeline.symbols import BETWEEN, NOT_LOADED, UNKNOWN_ADDRESS, Reason
from tests.unit.helpers import BASE
from tests.unit.history.test_modules import PAGE, Kept, past_of
from tests.unit.perf.test_handler import elsewhere
from tests.unit.perf_events import SECOND, bpf, event, node
from tests.unit.texts import annotated

__all__ = ["elsewhere"]
A, B = "[mod_a]", "/lib/modules/6.1.0/kernel/lib/mod-b.ko.xz"
STALE = "bpf_prog_00000000000000aa_a"


@pytest.fixture
def history(tmp_path: Path) -> str:
    """mod_a at BASE from 1 to 10 s, then mod_b from 12 s on."""
    kept = Kept(str(tmp_path / "m.db"))
    kept.load("mod_a", 0, SECOND)
    kept.unload("mod_a", 0, 10 * SECOND)
    kept.load("mod_b", 0, 12 * SECOND, [(0, 0x800, "of_b")])
    kept.writer.close(3600 * SECOND)
    return kept.path


#: Seconds, offset into the place; perf's name, offset and dso; name, offset and dso as printed.
CASES = [
    (5, 0x04, "first", 4, A, "first+0x4", "[mod_a]", "confirmed"),
    (5, 0x04, "alias", 4, A, "alias+0x4", "[mod_a]", "confirmed"),
    (5, 0x04, None, 0, A, "first+0x4", "[mod_a]", "added"),
    (5, 0x04, "of_b", 4, B, "first+0x4", "[mod_a]", "renamed"),
    (5, 0x04, STALE, 4, STALE, "first+0x4", "[mod_a]", "renamed"),
    (5, 0x44, "first", 0x44, A, "[unknown]", "[unknown]", "withdrawn"),
    (11, 0x04, "first", 4, A, "[unknown]", "[unknown]", "withdrawn"),
    (11, 0x04, None, 0, A, "[unknown]", "[mod_a]", "unknown"),
    (20, 0x04, "of_b", 4, B, "of_b+0x4", B, "confirmed"),
    (20, 0x04, "first", 4, A, "of_b+0x4", "[mod_b]", "renamed"),
    (20, 0x804, "other", 4, A, "[unknown]", "[unknown]", "withdrawn"),
    # What no history covers stays as perf has it.
    (4000, 0x04, "first", 4, A, "first+0x4", "[mod_a]", "confirmed"),
]


def counts(tally: Tally) -> dict[str, int]:
    found = {name: getattr(tally, name) for name in ("confirmed", "added", "renamed", "withdrawn")}
    found["unknown"] = sum(tally.unknown.values()) - tally.withdrawn
    return {name: count for name, count in found.items() if count}


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize(("at", "place", "name", "offset", "dso", "shown", "where", "count"), CASES)
def test_the_handler_names_a_module_s_frame_by_its_time(
    history: str,
    capsys: pytest.CaptureFixture[str],
    at: int,
    place: int,
    name: str | None,
    offset: int,
    dso: str,
    shown: str,
    where: str,
    count: str,
    times: int,
) -> None:
    handler = Handler(Options(history, MONOTONIC, "text"), None)
    frame = node(BASE + place, name, offset, dso)
    if name == STALE:
        frame = bpf(BASE + place, STALE)
    for turn in range(times):
        handler.process_event(event(frame, time=at * SECOND + turn * 1000))
    handler.trace_end()
    out = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("\t")]
    assert out == [f"{BASE + place:x} {shown} ({where})"] * times
    assert counts(handler.tally) == {count: times}


def test_what_perf_shows_as_inlined_stands_with_the_function_around_it(
    history: str, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = Handler(Options(history, MONOTONIC, "text"), None)
    for at in (5, 20):
        chain = [node(BASE + 4, name, 4, A) for name in ("helper", "inner", "first")]
        for turn in range(2):
            caller = node(BASE + (1 << 24), "caller", 4, "[kernel.kallsyms]")
            handler.process_event(event(*chain, caller, time=at * SECOND + turn))
    handler.trace_end()
    out = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line[:1] == "\t"]
    # Then another module was there, and none of these names can hold.
    now = ["helper+0x4", "inner+0x4", "first+0x4", "caller+0x4"]
    then = [*["of_b+0x4"] * 3, "caller+0x4"]
    assert out == [*now, *now, *then, *then]
    assert counts(handler.tally) == {"confirmed": 10, "renamed": 6}


def test_frames_that_come_again_are_named_by_their_time_and_counted_all(
    history: str, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = Handler(Options(history, MONOTONIC, "text"), None)
    for number in range(1000):
        at = 2 * SECOND + number * 20_000_000
        name, dso = ("of_b", B) if at > 11 * SECOND else ("first", A)
        handler.process_event(event(node(BASE + 4, name, 4, dso), time=at))
    handler.trace_end()
    printed = capsys.readouterr().out
    assert (printed.count("first+0x4"), printed.count("of_b+0x4")) == (401, 500)
    # In between, from 10 to 12 s, nothing was there.
    assert counts(handler.tally) == {"confirmed": 901, "withdrawn": 99}


@pytest.mark.parametrize(("at", "place", "name", "offset", "dso", "shown", "where", "count"), CASES)
def test_text_is_renamed_the_same_way(
    history: str,
    at: int,
    place: int,
    name: str | None,
    offset: int,
    dso: str,
    shown: str,
    where: str,
    count: str,
) -> None:
    symbol = f"{name}+{offset:#x}" if name else "[unknown]"
    line = f"\t{BASE + place:x} {symbol} ({dso})\n".encode()
    with History(history) as opened:
        past = past_of(opened)
        renamer = Renamer(past, past.clock_map(), MONOTONIC)
        out = annotated(f"p 7 {at}.000001: 1 cycles: \n".encode() + line, renamer)
    found = out.splitlines()[1].decode().strip()
    assert found == f"{BASE + place:x} {shown} ({where})"
    assert counts(renamer.tally) == {count: 1}


@pytest.mark.parametrize(
    ("dso", "is_one"),
    [
        ("[nf_tables]", True),
        ("/lib/modules/6.1.0/kernel/net/nf_tables.ko", True),
        ("/lib/modules/6.1.0/kernel/net/nf_tables.ko.xz", True),
        ("[kernel.kallsyms]", False),
        ("/usr/lib/debug/vmlinux-6.1", False),
        ("[bpf]", False),
        ("[guest.kernel.kallsyms]", False),
        ("[__builtin__kprobes]", False),
        ("/home/me.kore/prog", False),
        ("", False),
    ],
)
def test_what_is_a_module_s(dso: str, is_one: bool) -> None:
    assert is_module(dso) == is_one


@pytest.mark.parametrize(
    ("reason", "has_modules", "held"),
    [
        (NOT_LOADED, True, None),
        (NOT_LOADED, False, "nf_hook"),
        (UNKNOWN_ADDRESS, True, "nf_hook"),
        (BETWEEN, True, None),
        (BETWEEN, False, None),
    ],
)
def test_a_module_s_name_of_another_time_is_withdrawn(
    reason: Reason, has_modules: bool, held: str | None
) -> None:
    assert weigh(reason, "nf_hook", "[nf_tables]", Tally(), has_modules) == held


def test_a_name_of_the_core_image_stays_where_a_module_had_been() -> None:
    assert weigh(NOT_LOADED, "f", "[kernel.kallsyms]", Tally(), True) == "f"


def test_folded_addresses_have_a_module_s_function_if_it_is_the_only_one(tmp_path: Path) -> None:
    kept = Kept(str(tmp_path / "m.db"))
    kept.load("m", 0, 100)
    kept.unload("m", 0, 200)
    kept.load("m", 0, 300)
    kept.load("n", 8, 300, [(0, 64, "x")])
    kept.unload("n", 8, 400)
    kept.load("o", 8, 500, [(0, 64, "y")])
    kept.writer.close(1000)
    with History(kept.path) as opened:
        repairer = Repairer(past_of(opened))
        told = [
            repairer.line(b"p;0x%x 1\n" % (BASE + at)) for at in (4, 0x44, 0x1900, 8 * PAGE, 0x9000)
        ]
        left = b"p;0x%x 1\n"
        assert told == [
            b"p;first 1\n",
            left % (BASE + 0x44),
            b"p;second 1\n",
            left % (BASE + 8 * PAGE),
            left % (BASE + 0x9000),
        ]


def test_without_a_history_each_module_s_name_is_perf_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Modules come and go: what one was called there is not the next one's name."""
    handler = Handler(Options(None, MONOTONIC, "text"), str(tmp_path / "none"))
    for name, dso in (("first", A), ("other", "[mod_b]"), ("first", A)):
        frame = node(BASE + 4, name, 4, dso)
        handler.process_event(event(frame, frame, time=5 * SECOND))
    handler.trace_end()
    printed = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if "\t" in line]
    wanted = [["first+0x4", f"({A})"]] * 2 + [["other+0x4", "([mod_b])"]] * 2
    assert printed == wanted + wanted[:2]

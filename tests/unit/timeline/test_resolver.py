"""What decides a name: markers, user space, the past, the static tables, and the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from ksym_plugin.history.reader import History
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.timeline.resolver import FIRST_MARKER, Resolver
from ksym_plugin.timeline.symbols import (
    AMBIGUOUS,
    AMONG_BPF,
    CONTEXT_MARKER,
    EXACT,
    GRACE,
    HIDDEN,
    IN_MODULE,
    KERNEL,
    NOT_LOADED,
    OOL,
    OUTSIDE_HISTORY,
    UNKNOWN_ADDRESS,
    USER_ADDRESS,
    Frame,
    Load,
    Reason,
    Symbol,
)
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import (
    BASE,
    Held,
    changes_of,
    histories,
    load,
    questions,
    timeline_of,
    unload,
)

A, B = "bpf_prog_00000000000000aa_a", "bpf_prog_00000000000000bb_b"
TABLE = (
    b"ffffffff9a000000 T _text\nffffffff9a000100 T core_fn\nffffffff9a000200 T next_fn\n"
    b"ffffffff9b000000 T _etext\nffffffffc0100000 t mod_fn\t[demo]\n"
    b"ffffffffc0200000 t bpf_prog_00000000000000cc_listed\t[bpf]\n"
)
CORE, LISTED = 0xFFFFFFFF9A000110, 0xFFFFFFFFC0200008


def said(frame: Frame | Reason) -> object:
    if isinstance(frame, Reason):
        return frame
    module = f" [{frame.module.strip('[]')}]" if frame.module else ""
    return f"{frame.name}+{frame.offset:#x}{module} {frame.certainty}"


def test_markers_and_user_addresses_are_told_apart_from_frames() -> None:
    for resolver in (Resolver(), Resolver(Timeline(), Kallsyms.parse(TABLE))):
        assert resolver.frames([FIRST_MARKER, (1 << 64) - 512, (1 << 64) - 1], 5) == (
            [CONTEXT_MARKER] * 3
        )
        assert resolver.frames([0, 0x7F0000001234, (1 << 63) - 1, 1 << 64], 5) == (
            [USER_ADDRESS] * 4
        )
        assert resolver.resolve(FIRST_MARKER - 1, 5) is UNKNOWN_ADDRESS
        # [vsyscall], which user code calls at a fixed address.
        vsyscall = [0xFFFF_FFFF_FF60_0000, 0xFFFF_FFFF_FF60_0400, 0xFFFF_FFFF_FF60_0FFF]
        assert resolver.frames(vsyscall, 5) == [USER_ADDRESS] * 3
        assert resolver.is_kernel(0xFFFF_FFFF_FF5F_FFFF)
        assert resolver.is_kernel(0xFFFF_FFFF_FF60_1000)
        assert resolver.is_kernel(CORE)
        assert not resolver.is_kernel(FIRST_MARKER)


def test_past_decides_for_what_bpf_held_and_the_table_for_the_rest() -> None:
    past = timeline_of(load(BASE, 64, A, 10), unload(BASE, 20), load(BASE, 64, B, (30, 40)))
    resolver = Resolver(past, Kallsyms.parse(TABLE))
    addresses = [CORE, BASE + 4, BASE + 0x200, LISTED]
    assert [said(frame) for frame in resolver.frames(addresses, 15)] == [
        "core_fn+0x10 exact",
        f"{A}+0x4 [bpf] exact",
        "mod_fn+0x200 [demo] exact",
        AMONG_BPF,  # the table's BPF lines are of another time
    ]
    assert said(resolver.resolve(BASE + 4, 25)) == f"{A}+0x4 [bpf] {GRACE}"
    assert resolver.resolve(BASE + 4, 35) is AMBIGUOUS  # no module's name either
    assert said(resolver.resolve(BASE + 4, 45)) == f"{B}+0x4 [bpf] {EXACT}"


def test_without_a_past_the_tables_bpf_lines_count() -> None:
    frame = Resolver(None, Kallsyms.parse(TABLE)).resolve(LISTED, 5)
    assert said(frame) == f"bpf_prog_00000000000000cc_listed+0x8 [bpf] {EXACT}"


def test_without_anything_nothing_has_a_name() -> None:
    assert Resolver().resolve(CORE, 5) is UNKNOWN_ADDRESS
    assert Resolver(timeline_of(load(BASE, 64, A, 10))).resolve(BASE, 5) is NOT_LOADED


def test_program_loaded_where_the_table_was_asked_before_wins() -> None:
    """Also when it begins in the midst of what was cached, and after an expiry."""
    past = Timeline()
    resolver = Resolver(past, Kallsyms.parse(TABLE))
    places = [BASE + 0x40 * at for at in range(8)]
    for turn, place in enumerate(places):
        before = [said(frame) for frame in resolver.frames(places[turn:], 100)]
        assert before == [f"mod_fn+{at - BASE:#x} [demo] exact" for at in places[turn:]]
        past.apply(load(place, 0x40, A, 50))
        assert said(resolver.resolve(place + 1, 100)) == f"{A}+0x1 [bpf] exact"
    past.apply(unload(BASE, 60))
    past.expire(90)
    assert said(resolver.resolve(BASE + 1, 100)) == "mod_fn+0x1 [demo] exact"
    past.apply(load(BASE, 0x40, B, 95))
    assert said(resolver.resolve(BASE + 1, 100)) == f"{B}+0x1 [bpf] exact"


def test_static_answers_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Kallsyms.parse(TABLE)
    asked: list[int] = []
    find = Kallsyms.find

    def counted(self: Kallsyms, address: int) -> object:
        asked.append(address)
        return find(self, address)

    monkeypatch.setattr(Kallsyms, "find", counted)
    resolver = Resolver(timeline_of(load(BASE, 64, A, 10)), table)
    for time in range(100):
        assert said(resolver.resolve(CORE, time)) == "core_fn+0x10 exact"
    assert asked == [CORE]


@given(histories(images=True))
@settings(max_examples=60)
def test_answers_with_a_warm_cache_equal_those_of_a_fresh_one(held: list[Held]) -> None:
    past = Timeline()
    warm = Resolver(past, Kallsyms.parse(TABLE))
    asked = questions(held)[:60]
    for change in changes_of(held):
        for address, time in asked:
            warm.resolve(address, time)
        past.apply(change)
    fresh = Resolver(past, Kallsyms.parse(TABLE))
    for address, time in asked:
        assert said(warm.resolve(address, time)) == said(fresh.resolve(address, time))


def test_outside_the_history_the_core_image_has_its_names_still(tmp_path: Path) -> None:
    path = str(tmp_path / "h.db")
    writer = HistoryWriter(path, "test", 10, None)
    (lifetime,) = timeline_of(load(LISTED - 8, 64, A, 20)).lifetimes()
    writer.note(lifetime)
    writer.close(50)
    with History(path) as history:
        past = history.recorded(history.boots()[0])
        resolver = Resolver(past, Kallsyms.parse(TABLE))
        assert said(resolver.resolve(CORE, 99)) == "core_fn+0x10 exact"
        assert resolver.resolve(LISTED, 99) is OUTSIDE_HISTORY
        assert said(resolver.resolve(LISTED, 30)) == f"{A}+0x8 [bpf] exact"
        assert resolver.resolve(LISTED, 15) is NOT_LOADED


def test_code_among_programs_is_said_to_be_that(tmp_path: Path) -> None:
    """Whether the program is in memory or in a file, there still or not."""
    path, past = str(tmp_path / "h.db"), timeline_of(load(BASE, 64, A, 10), unload(BASE, 20))
    writer = HistoryWriter(path, "test", 0, None)
    for lifetime in past.lifetimes():
        writer.note(lifetime)
    writer.close(50)
    with History(path) as history:
        for known in (past, history.recorded(history.boots()[0])):
            resolver = Resolver(known)
            assert resolver.resolve(BASE + 0x400, 15) is AMONG_BPF
            assert resolver.resolve(BASE + 0x2000, 45) is AMONG_BPF
            assert resolver.resolve(BASE - 0x2000, 15) is AMONG_BPF
            # The area that they share begins anywhere.
            assert resolver.resolve(BASE + (1 << 21), 15) is AMONG_BPF
            assert resolver.resolve(BASE + (2 << 21), 15) is UNKNOWN_ADDRESS
            assert resolver.resolve(CORE, 15) is UNKNOWN_ADDRESS


@pytest.mark.parametrize("text", ["t other_fn", "d other_data"])
@pytest.mark.parametrize("has_sizes", [True, False])
def test_a_module_between_programs_is_no_classic_bpf(text: str, has_sizes: bool) -> None:
    lines = f"{BASE + 0x1000:x} d head\t[demo]\n{BASE + 0x3000:x} {text}\t[demo]\n"
    sizes = {"demo": (BASE + 0x1000, 0x4000), "far": (BASE - 0x9000, 0x1000)}
    table = Kallsyms.parse(TABLE + lines.encode(), sizes if has_sizes else {})
    past = timeline_of(load(BASE, 64, A, 10), load(BASE + 0x1100, 64, B, 10))
    past.apply(unload(BASE + 0x1100, 20))
    resolver = Resolver(past, table)
    later = 20 + 3_000_000_000
    assert resolver.resolve(BASE + 0x1010, later) is IN_MODULE
    assert resolver.resolve(BASE + 0x1104, later) is IN_MODULE
    assert resolver.resolve(BASE + 0x6000, later) is AMONG_BPF
    assert said(resolver.resolve(BASE + 0x1104, 15)) == f"{B}+0x4 [bpf] exact"
    expected = "other_fn+0x4 [demo] exact" if text[0] == "t" else IN_MODULE
    if has_sizes or text[0] == "t":
        assert said(resolver.resolve(BASE + 0x3004, later)) == expected
    assert Resolver(Timeline(), table).resolve(BASE + 0x1010, later) is IN_MODULE


def test_a_symbol_that_is_no_bpf_makes_no_ground_of_bpf() -> None:
    slot = Load(Symbol(BASE, BASE + 64, "kprobe_insn_page", OOL, None), 10, 10)
    past = Timeline()
    past.apply(slot)
    assert Resolver(past).resolve(BASE + 0x400, 20) is UNKNOWN_ADDRESS


def test_hidden_table_says_so_where_the_past_knows_nothing() -> None:
    hidden = Kallsyms.parse(b"0000000000000000 T _text\n0000000000000000 t fn\n")
    resolver = Resolver(timeline_of(load(BASE, 64, A, 10)), hidden)
    assert resolver.resolve(CORE, 20) is HIDDEN
    assert said(resolver.resolve(BASE, 20)) == f"{A}+0x0 [bpf] exact"
    assert resolver.resolve(BASE, 5) is NOT_LOADED


def test_a_table_of_32_bits() -> None:
    table = Kallsyms.parse(
        b"80008000 T _text\n80008000 T first\n80009000 T second\n8000a000 T _etext\n"
    )
    resolver = Resolver(timeline_of(load(0x7F000000, 64, A, 10)), table)
    assert said(resolver.resolve(0x80008010, 20)) == "first+0x10 exact"
    assert said(resolver.resolve(0x7F000004, 20)) == f"{A}+0x4 [bpf] exact"
    assert resolver.resolve(0x10000, 20) is USER_ADDRESS


def test_program_that_was_not_jited_hides_nothing() -> None:
    table = Kallsyms.parse(
        b"ffffffffa9b6b3b0 t __bpf_prog_run224\nffffffffa9b6b530 t __bpf_prog_run32\n"
        b"ffffffffa9b6b570 t next_demo\n"
    )
    start, past = 0xFFFFFFFFA9B6B530, Timeline()
    resolver = Resolver(past, table)
    for change in (
        load(start, 0, "bpf_prog_f958000000000000", 10),
        load(start, 0, "bpf_prog_8c42000000000000", 20),
        unload(start, 30),
    ):
        past.apply(change)
        frame = resolver.resolve(start + 0x10, 25)
        assert said(frame) == "__bpf_prog_run32+0x10 exact"
        assert isinstance(frame, Frame)
        assert frame.kind == KERNEL
    assert past.lifetimes() == []


def test_trampolines_and_dispatchers_by_their_own_names() -> None:
    names = ["bpf_trampoline_6442500001", "bpf_trampoline_6442500002_1", "bpf_dispatcher_xdp"]
    start = 0xFFFFFFFFC0040000
    images = [
        load(start + 0x2000 + 0x1000 * at, 4096, name, 10, open_ended=True)
        for at, name in enumerate(names)
    ]
    past = timeline_of(load(start, 0x100, "bpf_prog_1111111111111111_prog", 10), *images)
    lines = [f"{start:x} t bpf_prog_1111111111111111_prog\t[bpf]\n"]
    lines += [f"{each.symbol.start:x} t {each.symbol.name}\t[bpf]\n" for each in images]
    table = Kallsyms.parse("".join(lines).encode())
    for resolver in (Resolver(past), Resolver(None, table)):
        ips = [0xFFFFFFFFC004207D, 0xFFFFFFFFC0043018, 0xFFFFFFFFC0044010]
        frames = resolver.frames(ips, 20)
        assert [said(frame) for frame in frames] == [
            f"{name}+{offset:#x} [bpf] exact" for name, offset in zip(names, (0x7D, 0x18, 0x10))
        ]
        assert {frame.module for frame in frames if isinstance(frame, Frame)} == {"[bpf]"}


def test_frame_perf_had_named_gets_the_same_name_or_a_reason() -> None:
    name = "bpf_prog_2b95000000000000_lb"
    past = timeline_of(load(0xFFFFFFFFC09AC313, 0xC00, name, 10))
    frame = Resolver(past).resolve(0xFFFFFFFFC09ACE93, 20)
    assert said(frame) == f"{name}+0xb80 [bpf] exact"
    assert Resolver(past).resolve(0xFFFFFFFFB88000D4, 20) is UNKNOWN_ADDRESS


@pytest.mark.parametrize("past", [None, Timeline()])
def test_address_of_a_program_that_is_not_listed_is_not_the_modules(past: Timeline) -> None:
    text = b"ffffffffc0100000 t mod_a\t[a]\nffffffffc0180000 t mod_b\t[b]\n"
    sizes = {"a": (0xFFFFFFFFC0100000, 0x4000), "b": (0xFFFFFFFFC0180000, 0x8000)}
    for table in (Kallsyms.parse(text, sizes), Kallsyms.parse(text)):
        assert Resolver(past, table).resolve(0xFFFFFFFFC01C5754, 20) is UNKNOWN_ADDRESS


def test_table_of_another_boot_can_be_told_and_names_nothing_far_off() -> None:
    table = Kallsyms.parse(
        b"ffffffff9d000000 T _text\nffffffff9d000100 T fn\nffffffff9e000000 T _etext\n"
        b"ffffffffc0100000 d last_data\t[odd]\n"
    )
    assert table.text_start == 0xFFFFFFFF9D000000
    assert Resolver(None, table).resolve(0xFFFFFFFFB6E0017B, 20) is UNKNOWN_ADDRESS
    assert Resolver(None, table).resolve(0xFFFFFFFFDF000000, 20) is UNKNOWN_ADDRESS

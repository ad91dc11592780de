"""The handler, fed with events as perf makes them, over histories made for the purpose."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import identity
from ksym_plugin.kernel.clocks import MONOTONIC, Instant
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.perf import handler as module
from ksym_plugin.perf.data import Recorded
from ksym_plugin.perf.handler import Handler, Options
from ksym_plugin.timeline.symbols import AMONG_BPF, UNKNOWN_ADDRESS, Load, Loss, Symbol, Unload
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import BASE, load, unload
from tests.unit.history.test_history import record
from tests.unit.perf_events import (
    CALLCHAIN,
    CORE,
    GUEST_KERNEL,
    SAMPLED,
    SECOND,
    USER,
    VMLINUX,
    attr,
    bpf,
    event,
    node,
)

A, B = "bpf_prog_00000000000000aa_a", "bpf_prog_00000000000000bb_b"
HOUR = 3600 * SECOND
#: A at BASE for the first ten seconds, then B; something else never unloaded, two pages up.
CHANGES = [
    load(BASE, 64, A, SECOND),
    unload(BASE, 10 * SECOND, A),
    load(BASE, 64, B, 12 * SECOND),
    load(BASE + 0x2000, 0x1000, "bpf_trampoline_7", SECOND, open_ended=True),
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No history but what a test names, and no kernel but a small one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KSYM_HISTORY", raising=False)
    monkeypatch.setattr("ksym_plugin.history.locate.SYSTEM", str(tmp_path / "none.db"))
    monkeypatch.setattr(Kallsyms, "load", classmethod(lambda _: small_kernel()))


def small_kernel() -> Kallsyms:
    lines = (
        f"{CORE - 0x400:x} T _text",
        f"{CORE:x} T start_here",
        f"{CORE + 0x40:x} T next_here",
        f"{CORE + 0x1000:x} T _etext",
        f"{BASE + 0x80000:x} t nf_hook\t[nf_tables]",
    )
    return Kallsyms.parse("".join(f"{line}\n" for line in lines).encode(), {})


class Run:
    """A handler over a history of CHANGES, and what it prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str], form: str = "text") -> None:
        self._capsys = capsys
        self._form = form
        self._options = Options(None, MONOTONIC, form)
        self.text = self.said = ""

    def open(self, path: str | None, clock: str | None = MONOTONIC) -> Run:
        self._options = Options(path, clock, self._form)
        return self

    def feed(self, *events: Any) -> list[str]:
        """The printed lines, without the headers and the empty lines."""
        # Not before, as pytest gives a test another stdout than its fixtures.
        handler = Handler(self._options, None)
        for one in events:
            handler.process_event(one)
        handler.trace_end()
        self.text, self.said = self._capsys.readouterr()
        return [line.strip() for line in self.text.splitlines() if line.startswith("\t")]


@pytest.fixture
def path(tmp_path: Path) -> str:
    record(str(tmp_path / "h.db"), CHANGES, covered=HOUR)
    return str(tmp_path / "h.db")


@pytest.fixture
def run(path: str, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys).open(path)


def frame(address: int, text: str) -> str:
    return f"{address:16x} {text}".strip()


# What becomes of a name


def test_confirmed(run: Run) -> None:
    assert run.feed(event(bpf(BASE + 8, A, 8), time=5 * SECOND)) == [
        frame(BASE + 8, f"{A}+0x8 ([bpf])")
    ]
    assert "1 kernel frames: 1 confirmed, 0 renamed" in run.said
    assert "1 of them are BPF: 0 ran after" in run.said


def test_renamed(run: Run) -> None:
    lines = run.feed(event(bpf(BASE + 8, B, 8), time=5 * SECOND))
    assert lines == [frame(BASE + 8, f"{A}+0x8 ([bpf])")]
    assert "1 kernel frames: 0 confirmed, 1 renamed (perf had them wrong), 0 newly" in run.said


@pytest.mark.parametrize("dso", [None, VMLINUX, "/usr/lib/debug/boot/vmlinux-6.1"])
def test_newly_named_whatever_kernel_dso_it_has(run: Run, dso: str | None) -> None:
    lines = run.feed(event(node(BASE + 8, dso=dso), time=13 * SECOND))
    assert lines == [frame(BASE + 8, f"{B}+0x8 ([bpf])")]
    assert "0 renamed (perf had them wrong), 1 newly named" in run.said


def test_a_kernel_name_where_bpf_was_is_renamed(run: Run) -> None:
    lines = run.feed(event(node(BASE + 8, "_einittext", 999, VMLINUX), time=5 * SECOND))
    assert lines == [frame(BASE + 8, f"{A}+0x8 ([bpf])")]
    assert "1 renamed" in run.said


def test_withdrawn_before_anything_was_loaded(run: Run) -> None:
    lines = run.feed(event(bpf(BASE + 8, A, 8), time=SECOND // 2))
    assert lines == [frame(BASE + 8, "[unknown] ([bpf])")]
    assert "1 still unknown" in run.said
    assert "1 of the unknown had a name from perf that" in run.said


def test_past_the_end_of_a_program_nothing_is_named_after_it(run: Run) -> None:
    nodes = [node(BASE + 64), node(BASE + (2 << 21)), node(BASE + 64, dso="[nf_tables]")]
    lines = run.feed(*(event(one, time=5 * SECOND) for one in nodes))
    assert lines == [
        frame(BASE + 64, "[unknown] ([bpf])"),  # as classic BPF is
        frame(BASE + (2 << 21), "[unknown] ([unknown])"),
        frame(BASE + 64, "[unknown] ([nf_tables])"),
    ]
    assert f"1 unknown: {AMONG_BPF.text}" in run.said
    assert f"2 unknown: {UNKNOWN_ADDRESS.text}" in run.said


def test_after_the_unload_it_is_grace_until_the_next_load(run: Run) -> None:
    lines = run.feed(event(bpf(BASE + 8, B, 8), time=11 * SECOND))
    assert lines == [frame(BASE + 8, f"{A}+0x8 ([bpf])")]
    assert "1 ran after their unload (grace), 0 uncertain" in run.said


def test_images_are_named(run: Run) -> None:
    address = BASE + 0x2040
    lines = run.feed(event(node(address), bpf(address, "bpf_trampoline_7", 64), time=5 * SECOND))
    assert lines == [frame(address, "bpf_trampoline_7+0x40 ([bpf])")] * 2
    assert "2 kernel frames: 1 confirmed, 0 renamed (perf had them wrong), 1 newly" in run.said


def test_what_perf_appends_is_no_part_of_a_name(run: Run) -> None:
    shadowed = node(BASE + 8, f"{A}\0[bpf]", 8, f"{A}\0[bpf]")
    elsewhere = node(BASE + 0x9000, "nf_hook\0[nf]", 8, "[nf]\0")
    assert run.feed(event(shadowed, elsewhere, time=5 * SECOND)) == [
        frame(BASE + 8, f"{A}+0x8 ([bpf])"),
        frame(BASE + 0x9000, "nf_hook+0x8 ([nf])"),
    ]
    assert "2 kernel frames: 2 confirmed" in run.said


def test_outside_the_history_perf_s_name_stands(run: Run) -> None:
    lines = run.feed(event(bpf(BASE + 8, B, 8), node(BASE + 8), time=HOUR + SECOND))
    assert lines == [frame(BASE + 8, f"{B}+0x8 ({B})"), frame(BASE + 8, "[unknown] ([unknown])")]
    assert "1 unknown: the history does not cover that time" in run.said


def test_a_gap_marks_the_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "gap.db")
    loss = Loss(4 * SECOND, 6 * SECOND, "overrun", 3)
    record(path, [load(BASE, 64, A, SECOND), loss], covered=HOUR)
    run = Run(capsys).open(path)
    lines = run.feed(event(bpf(BASE + 8, A, 8), time=5 * SECOND))
    assert lines == [frame(BASE + 8, f"{A}?+0x8 ([bpf])")]
    assert "changes were lost 1 times" in run.said
    assert "1 uncertain (marked ?)" in run.said


def test_two_that_may_both_have_been_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "close.db")
    window = (4 * SECOND, 6 * SECOND)
    changes = [load(BASE, 64, A, SECOND), unload(BASE, window, A), load(BASE, 64, B, window)]
    record(path, changes, covered=HOUR)
    run = Run(capsys).open(path)
    lines = run.feed(event(bpf(BASE + 8, A, 8), time=5 * SECOND))
    assert lines == [frame(BASE + 8, "[unknown] ([unknown])")]
    assert "1 unknown: two symbols followed each other here too closely to tell" in run.said


def test_static_names_come_from_this_boot_s_kallsyms(run: Run) -> None:
    module_address = BASE + 0x80010
    lines = run.feed(event(node(CORE + 4), node(module_address), time=5 * SECOND))
    assert lines == [
        frame(CORE + 4, f"start_here+0x4 ({VMLINUX})"),
        frame(module_address, "nf_hook+0x10 ([nf_tables])"),
    ]
    assert "2 newly named" in run.said


def test_an_alias_that_perf_prefers_stands(run: Run) -> None:
    lines = run.feed(
        event(node(CORE + 4), node(CORE + 4, "__start_alias", 4, VMLINUX), time=5 * SECOND)
    )
    assert lines[1] == frame(CORE + 4, f"__start_alias+0x4 ({VMLINUX})")


# What is not the handler's to name


def test_user_frames_are_perf_s(run: Run) -> None:
    chain = (
        node(0x7F00_0000_1234, "main", 4, "/x/a", base=0x7F00_0000_0000),
        node(0x7F00, dso="/usr/lib/debug/lib/modules/6/vmlinux"),
        node(0x0606_258D_4C54_4155),
    )
    assert run.feed(event(*chain, cpumode=USER)) == [
        frame(0x1234, "main+0x4 (/x/a)"),
        frame(0x7F00, "[unknown] (/usr/lib/debug/lib/modules/6/vmlinux)"),
        frame(0x0606_258D_4C54_4155, "[unknown] ([unknown])"),
    ]
    assert "0 kernel frames" in run.said


END_OF_STACK = (1 << 64) - 1


def test_nothing_behind_a_user_address_is_the_kernel_s(run: Run) -> None:
    """What is found in a user's stack may look like anything; perf says where it looked."""
    garbage = node(BASE + 8)
    main = node(0x7F00_0000_1234, "main", 4, "/x/a", base=0x7F00_0000_0000)
    chain = bpf(BASE + 8, A, 8), main, garbage, node(CORE + 4), node(END_OF_STACK)
    shown = [
        frame(0x1234, "main+0x4 (/x/a)"),
        *(frame(one["ip"], "[unknown] ([unknown])") for one in chain[2:]),
    ]
    known = frame(BASE + 8, f"{A}+0x8 ([bpf])")
    assert run.feed(event(*chain, time=5 * SECOND)) == [known, *shown]
    assert "1 kernel frames: 1 confirmed" in run.said
    assert run.feed(event(*chain[1:], time=5 * SECOND)) == shown
    assert "0 kernel frames" in run.said


def test_a_sample_of_a_user_has_no_kernel_s_part(run: Run) -> None:
    chain = node(BASE + 8), node(CORE + 4, "f", 4, VMLINUX), node(END_OF_STACK)
    known = event(node(CORE + 4, "f", 4, VMLINUX), time=5 * SECOND)
    lines = run.feed(known, event(*chain, time=5 * SECOND, cpumode=USER))
    assert lines[1] == frame(BASE + 8, "[unknown] ([unknown])")
    assert lines[3] == frame(END_OF_STACK, "[unknown] ([unknown])")
    assert "1 kernel frames: 1 confirmed" in run.said


def test_a_stack_that_cannot_be_unwound_ends_at_once(run: Run) -> None:
    chain = bpf(BASE + 8, A, 8), node(END_OF_STACK), node(BASE + 8)
    assert run.feed(event(*chain, time=5 * SECOND)) == [
        frame(BASE + 8, f"{A}+0x8 ([bpf])"),
        frame(END_OF_STACK, "[unknown] ([unknown])"),
        frame(BASE + 8, "[unknown] ([unknown])"),
    ]


def test_the_vsyscall_page_is_the_user_s(run: Run) -> None:
    page = 0xFFFF_FFFF_FF60_0000
    chain = node(CORE + 4, "f", 4, VMLINUX), node(page + 4, dso="[vsyscall]"), node(BASE + 8)
    assert run.feed(event(*chain, time=5 * SECOND)) == [
        frame(CORE + 4, f"f+0x4 ({VMLINUX})"),
        frame(page + 4, "[unknown] ([vsyscall])"),
        frame(BASE + 8, "[unknown] ([unknown])"),
    ]
    assert "1 kernel frames: 1 confirmed" in run.said


@pytest.mark.parametrize("dso", ["[guest.kernel.kallsyms]", "[guest.kernel.kallsyms.4242]"])
def test_guest_frames_are_never_named_by_the_host(run: Run, dso: str) -> None:
    lines = run.feed(event(node(BASE + 8, dso=dso), node(BASE + 8, "f", 8, dso), time=5 * SECOND))
    assert lines == [frame(BASE + 8, f"[unknown] ({dso})"), frame(BASE + 8, f"f+0x8 ({dso})")]
    assert "0 kernel frames" in run.said


def test_a_guest_s_sample_without_a_dso_is_a_guest_s(run: Run) -> None:
    guest = event(node(CORE + 4), node(BASE + 8), time=5 * SECOND, cpumode=GUEST_KERNEL)
    leaf = event(time=5 * SECOND, cpumode=GUEST_KERNEL, ip=BASE + 8, attr=None)
    lines = run.feed(event(node(CORE + 4, "f", 4, VMLINUX), time=5 * SECOND), guest, leaf)
    assert lines == [
        frame(CORE + 4, f"f+0x4 ({VMLINUX})"),
        frame(CORE + 4, "[unknown] ([unknown])"),
        frame(BASE + 8, "[unknown] ([unknown])"),
        frame(BASE + 8, "[unknown] ([unknown])"),
    ]
    assert "1 kernel frames: 1 confirmed" in run.said


# Keys that are missing


def test_samples_without_a_callchain_are_one_frame(run: Run) -> None:
    plain = attr(sample_type=SAMPLED & ~CALLCHAIN)
    run.feed(
        event(time=5 * SECOND, ip=BASE + 8, attr=plain),
        event(time=5 * SECOND, ip=CORE + 4, attr=plain, symbol="f", symoff=4, dso=VMLINUX),
        event(time=5 * SECOND, ip=0x7F00, attr=plain, symbol="u", symoff=4, dso="/x/a"),
    )
    head = "            demo     8     5.000000:     250000 cpu-clock:  "
    assert run.text.splitlines() == [
        f"{head}{BASE + 8:16x} {A}+0x8 ([bpf])",
        f"{head}{CORE + 4:16x} f+0x4 ({VMLINUX})",
        f"{head}{0x7F00:16x} u+0x4 (/x/a)",
    ]


def test_events_with_hardly_a_key(run: Run) -> None:
    chain = [
        {"ip": CORE + 4},
        {"ip": BASE + 8, "dso": VMLINUX},
        {"ip": 0x4010, "sym": {"name": "main"}, "dso": "/x/a"},
        {"ip": 0x7F00, "dso": "/usr/lib/debug/lib/modules/6/vmlinux"},
    ]
    sample = {"pid": 7, "tid": 7, "ip": CORE + 4, "time": 5 * SECOND}
    full = {"comm": "demo", "ev_name": "cycles", "sample": sample, "callchain": chain}
    lines = run.feed(full, {"comm": "demo", "sample": {"pid": 7, "ip": CORE + 4}})
    assert lines == [
        frame(CORE + 4, f"start_here+0x4 ({VMLINUX})"),
        frame(BASE + 8, f"{A}+0x8 ([bpf])"),
        frame(0x4010, "main (/x/a)"),
        frame(0x7F00, "[unknown] (/usr/lib/debug/lib/modules/6/vmlinux)"),
        frame(CORE + 4, f"start_here+0x4 ({VMLINUX})"),
    ]
    assert "samples" not in run.said


def test_an_empty_name_and_dso_count_as_none(run: Run) -> None:
    empty = {"ip": BASE + 8, "sym": {"name": "", "start": 0, "end": 0}, "sym_off": 8, "dso": ""}
    assert run.feed(event(empty, node(CORE, "f", 0, VMLINUX), time=5 * SECOND)) == [
        frame(BASE + 8, f"{A}+0x8 ([bpf])"),
        frame(CORE, f"f+0x0 ({VMLINUX})"),
    ]


# Kept frames of the core image


def test_inlined_functions_keep_their_names(run: Run) -> None:
    chain = [node(CORE + 4, name, 4, VMLINUX) for name in ("inner", "middle", "outer")]
    top = node(CORE + 0x50, "top", 4, VMLINUX)
    wanted = [f"{name}+0x4" for name in ("inner", "middle", "outer", "top")]
    lines = run.feed(*[event(*chain, top, time=5 * SECOND) for _ in range(3)])
    assert [line.split()[1] for line in lines] == wanted * 3
    assert "12 kernel frames: 12 confirmed" in run.said


def test_inlined_functions_in_a_recursion(run: Run) -> None:
    chain = [node(CORE + 4, name, 4, VMLINUX) for name in ("inner", "outer")]
    plain = [node(CORE + 0x50, "again", 4, VMLINUX)] * 3
    lines = run.feed(*[event(*chain, *chain, *plain, time=5 * SECOND) for _ in range(3)])
    names = [line.split()[1].partition("+")[0] for line in lines]
    assert names == ["inner", "outer", "inner", "outer", "again", "again", "again"] * 3
    assert "21 kernel frames: 21 confirmed" in run.said


def test_inlined_functions_beside_samples_without_a_callchain(run: Run) -> None:
    plain = attr(sample_type=SAMPLED & ~CALLCHAIN)
    leaf = event(time=5 * SECOND, ip=CORE + 4, attr=plain, symbol="outer", symoff=4, dso=VMLINUX)
    chain = [node(CORE + 4, name, 4, VMLINUX) for name in ("inner", "outer")]
    run.feed(*[leaf, event(*chain, time=5 * SECOND)] * 2)
    names = re.findall(r"(\w+)\+0x4 ", run.text)
    assert names == ["outer", "inner", "outer"] * 2


@pytest.mark.parametrize("dso", [VMLINUX, "/usr/lib/debug/boot/vmlinux-6.1"])
def test_a_kept_frame_never_hides_bpf(run: Run, dso: str) -> None:
    # perf claims the core image for an address that BPF holds at other times.
    wrong = node(BASE + 8, "_einittext", 99, dso)
    lines = run.feed(
        event(wrong, time=HOUR + 1),
        event(wrong, time=SECOND // 2),
        event(wrong, time=11 * SECOND),
        event(wrong, time=5 * SECOND),
        event(wrong, time=13 * SECOND),
    )
    names = [line.split()[1].partition("+")[0] for line in lines]
    # Under grace either may be right; what matters is what comes after it.
    assert names[:2] == ["_einittext", "_einittext"]
    assert names[3:] == [A, B]


# Clocks


@pytest.mark.parametrize("ahead", [30, -30])
def test_where_a_clock_was_set_no_name_is_wrong_and_unmarked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ahead: int
) -> None:
    """Read at 1 s and 40 s, it is set at any time between; A is there until 10 s, B from 12 s."""
    path, real = str(tmp_path / "set.db"), 1_700_000_000
    writer = HistoryWriter(path, "test", 0, None)
    record_into(writer)
    for at, shift in ((1, real), (40, real + ahead)):
        writer.tick(Instant(at * SECOND, at * SECOND, (at + shift) * SECOND, None))
    writer.close(HOUR)
    raw = attr(clockid=time.CLOCK_REALTIME)
    times = [(at, shift) for at in (3, 14, 30) for shift in (real, real + ahead)]
    stale = {3: B, 14: A, 30: A}
    lines = (
        Run(capsys)
        .open(path, None)
        .feed(
            *(
                event(bpf(BASE + 8, stale[at], 8), time=(at + shift) * SECOND, attr=raw)
                for at, shift in times
            )
        )
    )
    names = [line.split()[1].partition("+")[0] for line in lines]
    for (at, _), name in zip(times, names):
        assert name in (A if at < 10 else B, stale[at] + "?")
    assert any(name.endswith("?") for name in names)
    assert any(not name.endswith("?") for name in names)


def clocked(tmp_path: Path, perf: int | None) -> str:
    """A history whose clocks are read once: boot time a minute ahead, real time far."""
    path = str(tmp_path / "clocks.db")
    writer = HistoryWriter(path, "test", 0, None)
    record_into(writer)
    writer.tick(Instant(SECOND, 61 * SECOND, 1_700_000_000 * SECOND, perf))
    writer.close(HOUR)
    return path


def record_into(writer: Any) -> None:
    timeline = Timeline()
    for change in CHANGES:
        lifetime = timeline.apply(change)
        if lifetime is not None:
            writer.note(lifetime)


@pytest.mark.parametrize(
    "clockid, shift",
    [
        (time.CLOCK_MONOTONIC, 0),
        (time.CLOCK_BOOTTIME, 60 * SECOND),
        (time.CLOCK_REALTIME, 1_699_999_999 * SECOND),
        (None, -SECOND // 2),
    ],
)
def test_the_clock_is_the_attr_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clockid: int | None, shift: int
) -> None:
    run = Run(capsys).open(clocked(tmp_path, SECOND // 2), None)
    raw = attr(clockid=clockid)
    lines = run.feed(
        event(bpf(BASE + 8, B, 8), time=5 * SECOND + shift, attr=raw),
        event(bpf(BASE + 8, A, 8), time=13 * SECOND + shift, attr=raw),
    )
    assert [line.split()[1] for line in lines] == [f"{A}+0x8", f"{B}+0x8"]


@pytest.mark.parametrize("clockid", [time.CLOCK_MONOTONIC_RAW, 11, -5, None])
def test_a_clock_that_cannot_be_placed_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clockid: int | None
) -> None:
    run = Run(capsys).open(clocked(tmp_path, None), None)
    raw = attr(clockid=clockid)
    frames = [bpf(BASE + 8, B, 8), node(CORE, "f", 0, VMLINUX)]
    lines = run.feed(*[event(*frames, attr=raw, ev_name=f"event{at % 3}") for at in range(9)])
    assert lines == [frame(BASE + 8, f"{B}+0x8 ({B})"), frame(CORE, f"f+0x0 ({VMLINUX})")] * 9
    assert run.said.count("on a clock that the history cannot place") == 1
    assert "18 kernel frames: 9 confirmed, 0 renamed" in run.said
    assert "9 BPF frames are as perf had them, unverified" in run.said


@pytest.mark.parametrize("stamp", [0, (1 << 64) - 1, None])
def test_a_sample_without_a_time_stays_as_perf_has_it(run: Run, stamp: int | None) -> None:
    lines = run.feed(event(bpf(BASE + 8, B, 8), time=stamp))
    assert lines == [frame(BASE + 8, f"{B}+0x8 ({B})")]
    assert "1 kernel frames: 0 confirmed" in run.said
    assert "1 BPF frames are as perf had them, unverified" in run.said


# A history that is being written


def test_samples_wait_until_the_history_covers_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The writes and their order are the truth: a program a turn, each at the same address."""
    begin, turn, programs = time.monotonic_ns() + HOUR, SECOND // 50, 9
    path = str(tmp_path / "growing.db")
    writer = HistoryWriter(path, "test", begin, None)
    timeline = Timeline()
    names = [f"bpf_prog_{number:016x}_p" for number in range(programs)]
    changes: list[Load | Unload] = []
    for at, name in enumerate(names, 1):
        changes.append(load(BASE, 64, name, begin + at * turn))
        changes.append(unload(BASE, begin + at * turn + turn - 1, name))
    committed = begin

    def record_on(_seconds: float) -> None:
        nonlocal committed
        committed = min(committed + turn // 3, begin + (programs + 1) * turn)
        while changes and changes[0].earliest <= committed:
            lifetime = timeline.apply(changes.pop(0))
            if lifetime is not None:
                writer.note(lifetime)
        writer.commit(committed)

    monkeypatch.setattr(time, "sleep", record_on)
    handler = Handler(Options(path, MONOTONIC, "text"), None)
    assert len(changes) > programs
    # perf takes the address for the core image's; that is not cached for what comes later.
    for at in range(4 * (programs + 1)):
        taken = begin + at * turn // 4 + 1
        handler.process_event(event(node(BASE + 8, "_einittext", 9, VMLINUX), time=taken))
    monkeypatch.setattr("ksym_plugin.history.reader.HEARTBEAT", SECOND // 100)
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    given_up = []
    for _ in range(9):
        handler.process_event(event(bpf(BASE + 8, A, 8), time=begin + 2 * programs * turn))
        given_up.append(len(waits))
    handler.trace_end()
    writer.close(begin + programs * turn)
    printed = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "\t" in line]
    expected = ["_einittext+0x9"] * 4 + [f"{name}+0x8" for name in names for _ in range(4)]
    # The writer does not get on: that is waited for once, and perf's names stand.
    assert printed == expected + [f"{A}+0x8"] * 9
    assert 0 < given_up[0] == given_up[-1]


# Which history


def recorded(**known: Any) -> Recorded:
    found = Recorded()
    for name, value in known.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    "known",
    [
        {"build_id": "00" * 20},
        {"host": "another"},
        {"release": "5.0.0-other"},
        {"text_start": 0xFFFF_FFFF_8000_0000},
    ],
)
@pytest.mark.parametrize("is_explicit", [True, False])
def test_the_history_of_another_kernel_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    known: dict[str, Any],
    is_explicit: bool,
) -> None:
    path = str(tmp_path / "ksym.db")
    monkeypatch.setattr(identity, "build_id", lambda *_: "ab" * 20)
    HistoryWriter(path, "test", 0, CORE).close(HOUR)
    monkeypatch.setattr(module.data, "read", lambda _: recorded(**known))
    with pytest.raises(SystemExit) as stopped:
        begin(monkeypatch, ["-H", path] if is_explicit else [])
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert "has no record of the kernel this perf.data is from" in said
    assert said.count("\n") == 1


def begin(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> Handler:
    """As perf's interpreter starts it, which is left as it is."""
    monkeypatch.setattr(module.sys, "builtin_module_names", ("perf_trace_context",))
    monkeypatch.setattr(module.gc, "disable", lambda: None)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(module.sys.stdout, "reconfigure", lambda **_: None, raising=False)
    return module.start(arguments)


@pytest.mark.parametrize("content", [None, b"", b"junk" * 2000, b"SQLite format 3\0" + b"\0" * 84])
def test_a_history_that_cannot_be_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
) -> None:
    path = tmp_path / "named.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        begin(monkeypatch, ["-H", str(path)])
    said = capsys.readouterr().err
    assert stopped.value.code == 1
    assert said.startswith("ksym: ") and said.count("\n") == 1
    assert "named.db" in said
    assert content is None or path.read_bytes() == content


# Without a history


def live(name: str, since: tuple[int, int], start: int = BASE) -> Load:
    symbol = Symbol(start, start + 64, name, "bpf_prog", "[bpf]")
    return Load(symbol, *since)


def open_live(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *loads: Load
) -> Run:
    from ksym_plugin.kernel import snapshot

    class Taken:
        def __init__(self) -> None:
            self.loads = list(loads)

    monkeypatch.setattr(snapshot, "take", Taken)
    return Run(capsys).open(None)


def test_what_is_loaded_now_is_named_from_its_load_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_live(monkeypatch, capsys, live(B, (12 * SECOND, 12 * SECOND)))
    lines = run.feed(event(node(BASE + 8), time=13 * SECOND), event(node(BASE + 8), time=SECOND))
    assert lines == [frame(BASE + 8, f"{B}+0x8 ([bpf])"), frame(BASE + 8, "[unknown] ([unknown])")]


@pytest.mark.parametrize("stamp", [0, (1 << 64) - 1, 5 * SECOND])
def test_of_what_was_there_before_perf_s_name_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stamp: int
) -> None:
    run = open_live(monkeypatch, capsys, live(B, (12 * SECOND, 12 * SECOND)))
    lines = run.feed(event(bpf(BASE + 8, A, 8), time=stamp))
    assert lines == [frame(BASE + 8, f"{A}+0x8 ({A})")]


def test_hidden_addresses_are_not_taken_for_another_kernel_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listing = f"{0:016x} T _text\n{0:016x} T start_here\n".encode()
    monkeypatch.setattr(Kallsyms, "load", classmethod(lambda _: Kallsyms.parse(listing, {})))
    run = open_live(monkeypatch, capsys, live(B, (12 * SECOND, 12 * SECOND)))
    lines = run.feed(
        event(node(CORE, "start_here", 0, VMLINUX), node(CORE + 0x44), time=13 * SECOND),
        event(node(BASE + 8), time=13 * SECOND),
    )
    assert lines == [
        frame(CORE, f"start_here+0x0 ({VMLINUX})"),
        frame(CORE + 0x44, "[unknown] ([unknown])"),
        frame(BASE + 8, f"{B}+0x8 ([bpf])"),
    ]
    assert "kernel addresses are hidden from this user; run as root" in run.said
    assert "are not this kernel's" not in run.said


def test_data_of_another_boot_is_not_named_by_this_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.data, "read", lambda _: recorded(release="5.0.0-other"))
    run = Run(capsys).open(None)
    lines = run.feed(event(node(BASE + 8), node(CORE + 4)))
    assert "another boot" in run.said
    assert [line.split()[1] for line in lines] == ["[unknown]"] * 2


# Folded


def test_folded(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "folded").open(path)
    chain = (bpf(BASE + 8, B, 8), node(CORE, "f", 0, VMLINUX), node(0x4010, "La/B;::c", 4, "/x/a"))
    bare = (node(BASE + 0x9000, dso="[nf]"), node(0x10, dso="/x/libc.so"), node(0x20))
    run.feed(*[event(*chain, time=5 * SECOND)] * 3, event(*bare, comm="a;b\nc"))
    assert run.text.splitlines() == [
        "a:b c;[unknown];[libc.so];[[nf]]_[k] 1",
        f"demo;La/B:::c;f_[k];{A}_[k] 3",
    ]


def test_a_program_perf_named_is_the_kernel_s_when_folded(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(capsys, "folded").open(path)
    run.feed(event(bpf(BASE + 8, B, 8), time=HOUR + 1))
    assert run.text == f"demo;{B}_[k] 1\n"

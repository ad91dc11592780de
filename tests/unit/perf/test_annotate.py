"""perf script text repaired: what changes, and above all what does not."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ksym_plugin.history.reader import History
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import identity
from ksym_plugin.kernel.clocks import PERF, ClockMap, Instant
from ksym_plugin.perf.repaint import Annotator, Renamer
from ksym_plugin.perf.text import LONGEST
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.resolver import Locator
from ksym_plugin.timeline.symbols import Lifetime, Loss
from tests.unit.helpers import Held, histories, load, timeline_of, unload
from tests.unit.texts import (
    PLACE,
    SECOND,
    TABLE,
    A,
    B,
    Lines,
    annotated,
    corpus,
    folded,
    one_place,
    renamer,
    statics,
)

SLOW_MACHINE = [HealthCheck.too_slow]
REPO = Path(__file__).parents[3]
#: A line that the history changes, and what it makes of it.
LINE = b"\tffffffffc0001004 [unknown] ([unknown])\n"
NAMED = b"\tffffffffc0001004 %s+0x4 ([bpf])\n"
#: The same while nobody is there who has a name.
NAMELESS = b"\tffffffffc0001004 [unknown] ([bpf])\n"


def sample(time: str, line: bytes = LINE) -> bytes:
    return f"demo  77 [000] {time}:  1 cycles: \n".encode() + line + b"\n"


def at(time: str, line: bytes = LINE) -> bytes:
    """The frame as it is repaired at a time."""
    return annotated(sample(time, line), renamer(one_place())).splitlines(True)[1]


@pytest.mark.parametrize("path", corpus())
@pytest.mark.parametrize("piece", [1 << 20, 4096, 61])
def test_with_an_empty_history_every_text_stays_as_it_is(path: Path, piece: int) -> None:
    text = path.read_bytes()
    for variant in (text, text.replace(b"\n", b"\r\n"), text.rstrip(b"\n")):
        assert annotated(variant, piece=piece) == variant


def test_the_name_is_that_of_the_sample_s_time() -> None:
    assert at("5.500000") == NAMED % A.encode()
    assert at("6.500000") == NAMED % B.encode()
    assert at("4.500000") == at("4.500000", NAMELESS) == NAMELESS
    assert at("6.500000", b"\tffffffffc0001004 %s+0x4 (%s)\n" % (A.encode(), A.encode())) == (
        NAMED % B.encode()
    )


def test_a_microsecond_is_all_of_its_nanoseconds() -> None:
    # B was loaded 500 ns into this microsecond, and A had gone 300 ns earlier.
    assert at("6.000000") == LINE
    assert at("6.000000", NAMED % A.encode()) == NAMED % (A + "?").encode()
    assert at("6.000000400") == NAMED % A.encode()
    assert at("6.000000500") == NAMED % B.encode()
    assert at("6.000001") == NAMED % B.encode()
    assert at("5.999999") == NAMED % A.encode()
    by = renamer(one_place())
    annotated(sample("6.000000", NAMED % A.encode()) + sample("6.000000"), by)
    assert (by.tally.coarse, sum(by.tally.unknown.values()), by.tally.frames) == (1, 1, 2)
    assert any("within what is known" in line for line in by.report())


def test_one_name_at_both_ends_of_a_time_is_no_proof() -> None:
    past = timeline_of(
        load(PLACE, 64, A, 5 * SECOND),
        unload(PLACE, 5_510_000_000),
        load(PLACE, 64, B, 5_520_000_000),
        unload(PLACE, 5_530_000_000),
        load(PLACE, 64, A, 5_540_000_000),
    )
    assert annotated(sample("5.5"), renamer(past)) == sample("5.5")
    assert annotated(sample("5.50"), renamer(past)) == sample("5.50", NAMED % A.encode())


def test_a_module_of_now_is_no_proof_that_no_program_was_there_meanwhile() -> None:
    past = timeline_of(load(PLACE, 64, A, 5 * SECOND), unload(PLACE, 6 * SECOND))
    table = TABLE + b"ffffffffc0001000 t nf_hook\t[nf_tables]\n"
    named = LINE.replace(b"[unknown] ([unknown])", b"nf_hook+0x4 ([nf_tables])")
    assert annotated(sample("9.500000"), renamer(past, table)) == sample("9.500000", named)
    clocks = ClockMap([Instant(0, 0, 0, 0), Instant(20 * SECOND, 0, 0, 4 * SECOND)])
    by = Renamer(past, clocks, None, lambda: (None, statics(table)))
    assert annotated(sample("2.500000"), by) == sample("2.500000")


def test_a_program_that_was_not_there_loses_its_name() -> None:
    wrong = b"\tffffffffc0001004 %s+0x4 (%s)\n" % (B.encode(), B.encode())
    assert at("4.500000", wrong) == NAMELESS


def test_classic_bpf_loses_the_name_of_its_neighbour() -> None:
    """Each time; and what else perf names there keeps its name."""
    line = b"\tffffffffc0003004 bpf_dispatcher_xdp+0x1c04 ([kernel.kallsyms])\n"
    text = sample("5.5", line) + sample("5.6", line)
    nameless = b"\tffffffffc0003004 [unknown] ([bpf])\n"
    assert annotated(text, renamer(one_place())) == sample("5.5", nameless) + sample(
        "5.6", nameless
    )
    text = text.replace(b"bpf_dispatcher_xdp", b"nf_hook")
    assert annotated(text, renamer(one_place())) == text


def test_a_kernel_function_keeps_its_name() -> None:
    line = b"\tffffffffc0001004 nf_hook+0x4 ([nf_tables])\n"
    assert at("4.500000", line) == line
    core = b"\tffffffff81000404 alias+0x4 ([kernel.kallsyms])\n"
    assert annotated(sample("5.5", core), renamer(one_place(), TABLE)) == sample("5.5", core)


def test_what_is_uncertain_is_marked_once() -> None:
    past = timeline_of(load(PLACE, 64, A, 10), Loss(5 * SECOND, 6 * SECOND, "made up"))
    once = annotated(sample("5.500000"), renamer(past))
    assert once == sample("5.500000", NAMED % (A.encode() + b"?"))
    assert annotated(once, renamer(past)) == once
    lost = timeline_of(Loss(5 * SECOND, 6 * SECOND, "made up"))
    line = b"\tffffffffc0001004 %s+0x4 (%s)\n" % (A.encode(), A.encode())
    marked = annotated(sample("5.500000", line), renamer(lost))
    assert marked == sample("5.500000", line.replace(b"_a+", b"_a?+"))
    assert annotated(marked, renamer(lost)) == marked


def test_style_of_the_text_is_kept() -> None:
    assert at("5.5", b"\tffffffffc0001004 %s (%s)\r\n" % (B.encode(), B.encode())) == (
        b"\tffffffffc0001004 %s ([bpf])\r\n" % A.encode()
    )
    # perf script -F without dso.
    bare = b"\tffffffffc0001004 %s\n"
    assert at("5.5", bare % b"[unknown]") == bare % (A.encode() + b"+0x4")
    assert at("5.5", b"\tffffffffc0001004 %s\0[bpf]+0x4 (%s)\n" % (A.encode(), A.encode())) == (
        NAMED % A.encode()
    )


GARBAGE = b"\tffffffffc0001004 [unknown] ([unknown])\n"
INSIDE = b"\t    55d0c0de1150 work+0x67 (/opt/app)\n"


def test_behind_a_user_address_nothing_is_the_kernel_s() -> None:
    """Return addresses in a user's stack are whatever lies there."""
    for stack in (
        INSIDE + GARBAGE + b"\t               0 [unknown] ([unknown])\n",
        INSIDE + b"  app.c:12\n" + GARBAGE,
        INSIDE + GARBAGE + b"\tffffffffffffffff [unknown] ([unknown])\n",
        b"\tffffffffff600004 [unknown] ([vsyscall])\n" + GARBAGE,
        b"\t    55d0c0de1150 inner (inlined)\n" + GARBAGE,
    ):
        by = renamer(one_place(), TABLE)
        text = sample("5.500000", GARBAGE + stack) + sample("5.500000", stack)
        # The same lines once more, whatever is kept of them by now, and line by line.
        for piece in (1 << 20, 50):
            shown = annotated(text + text, by, piece)
            assert shown == (text + text).replace(
                b"cycles: \n" + GARBAGE, b"cycles: \n" + NAMED % A.encode()
            )
        assert by.tally.frames == by.tally.added == 4
        assert sum(stack.count(A) for stack in folded(text, renamer(one_place()))) == 1


@pytest.mark.parametrize("first", [INSIDE, b"\tffffffff81000404 alpha+0x4 ([kernel.kallsyms])\n"])
def test_a_sample_in_two_pieces_is_named_by_its_own_time(first: bytes) -> None:
    text = sample("5.500000", first) + sample("6.600000")
    named = text.replace(LINE, NAMED % B.encode())
    for cut in range(len(text)):
        by = Annotator(renamer(one_place()))
        assert by.feed(text[:cut]) + by.feed(text[cut:]) + by.close() == named


def test_a_guest_s_frame_and_an_inlined_one_do_not_end_the_kernel_s_part() -> None:
    for line in (
        b"\tffffffff81000404 [unknown] ([guest.kernel.kallsyms])\n",
        b"\tffffffff81000404 inner (inlined)\n",
        b"  file.c:12\n",
        b"  \n",
    ):
        text = sample("5.500000", line + LINE)
        assert annotated(text, renamer(one_place(), TABLE)) == text.replace(
            LINE, NAMED % A.encode()
        )


def test_samples_out_of_order_are_named_by_their_own_times() -> None:
    times = ("6.500000", "4.500000", "5.500000", "4.600000", "6.600000", "5.600000", "7.500000")
    for order in (times, times[::-1], times[3:] + times[:3]):
        by = renamer(one_place())
        text = b"".join(sample(time) for time in order * 2)
        assert annotated(text, by) == b"".join(sample(time, at(time)) for time in order * 2)


@pytest.mark.parametrize("junk", [b"\t          s])\n", b"\tof another (writer)\n", b"? (x)\n"])
def test_junk_does_not_end_the_kernel_s_part(junk: bytes) -> None:
    text = sample("5.500000", LINE + junk + LINE)
    for passed in (text, text + text):
        named = passed.replace(LINE, NAMED % A.encode())
        assert annotated(passed, renamer(one_place())) == named


def test_what_has_no_time_is_named_by_nothing_that_comes_and_goes() -> None:
    without = b"demo 77 cycles:\n" + LINE + b"\n"
    assert annotated(without, renamer(one_place())) == without.replace(LINE, NAMELESS)
    # The time of a sample ends with it.
    strange = b"what begins here is no header\n" + LINE + b"\n"
    text = sample("5.500000") + strange
    named = sample("5.500000", NAMED % A.encode())
    nameless = strange.replace(LINE, NAMELESS)
    assert annotated(text, renamer(one_place())) == named + nameless
    text = sample("5.500000") + LINE
    assert annotated(text, renamer(one_place())) == named + NAMELESS


def test_times_are_on_a_clock() -> None:
    clocks = ClockMap([Instant(10 * SECOND, 0, 0, 8 * SECOND), Instant(20 * SECOND, 1, 1, None)])
    text = sample("3.500000")
    by_perf = Renamer(one_place(), clocks, None)
    assert annotated(text, by_perf) == sample("3.500000", NAMED % A.encode())
    by_monotonic = Renamer(one_place(), clocks, "monotonic")
    assert annotated(text, by_monotonic) == sample("3.500000", NAMELESS)
    with pytest.raises(KsymError, match="perf clock"):
        Renamer(one_place(), ClockMap([Instant(1, 1, 1, None)]), None)


def test_each_event_has_its_clock() -> None:
    clocks = ClockMap([Instant(10 * SECOND, 0, 0, 8 * SECOND), Instant(20 * SECOND, 1, 1, None)])
    by = Renamer(one_place(), clocks, {b"cycles": "monotonic", b"faults": "perf"})
    text = sample("5.500000") + sample("3.500000").replace(b"cycles", b"faults")
    assert annotated(text, by) == text.replace(LINE, NAMED % A.encode())
    # Of an event that nobody told of, nothing that comes and goes is named.
    other = sample("5.500000").replace(b"cycles", b"other")
    assert annotated(other, by) == other.replace(LINE, NAMELESS)
    with pytest.raises(KsymError, match="perf clock"):
        Renamer(one_place(), ClockMap([Instant(1, 1, 1, None)]), {b"cycles": "perf"})


def test_a_line_that_can_be_a_header_is_printed_as_what_it_is() -> None:
    line = b"\tffffffffc0001004 77 5.500000: ffffffffc0001004 [unknown] (x)\n"
    frame = NAMED.replace(b"+0x4", b"") % A.encode()
    header = line.replace(b"[unknown] (x)", b"%s+0x4 ([bpf])" % A.encode())
    text = b"\n" + line + b"\n" + sample("5.500000", line)
    assert annotated(text, renamer(one_place())) == b"\n" + header + b"\n" + sample(
        "5.500000", frame
    )


def test_source_lines_stand_below_frames() -> None:
    core = b"\tffffffff81000404 alpha+0x4 ([kernel.kallsyms])\n"
    user = b"\t          401000 main+0x4 (/bin/x)\n"
    for text in (sample("5.500000", LINE + core + user), sample("5.5", LINE + core + user)[:-1]):
        annotator = Annotator(renamer(one_place()), Locator(Lines(), Lines()))
        shown = annotator.feed(text) + annotator.close()
        # A caller is at the call, which ends before its return address.
        assert shown.splitlines()[1:6] == [
            NAMED.strip(b"\n") % A.encode(),
            b"  a_b.c:4",
            core.strip(b"\n"),
            b"  a_b.c:%d" % 0x403,
            user.strip(b"\n"),
        ]


def test_a_sample_without_a_time_is_at_none() -> None:
    for stamp in ("0.000000", "18446744073.709551"):
        text = sample(stamp)
        past = timeline_of(load(PLACE, 64, A, (0, 1)))
        assert annotated(text, renamer(past)) == sample(stamp, NAMELESS)


def test_a_history_that_is_being_written_is_waited_for() -> None:
    past = one_place()
    clocks = ClockMap([Instant(1, 1, 1, 1)])
    asked: list[int] = []

    def follow(until: int) -> tuple[int, ClockMap]:
        asked.append(until)
        return (until + SECOND if until < 7 * SECOND else 7 * SECOND), clocks

    by = Renamer(past, clocks, "monotonic", follow=follow)
    core = b"\tffffffff81000404 alpha+0x4 ([kernel.kallsyms])\n"
    text = b"".join(sample(f"{time}.500000") for time in (5, 6, 6, 8, 9))
    out = annotated(text + sample("10.0", core), by)
    # Not for a time that is covered; nor again once its writer does not get on.
    assert asked == [5_500_000_999, 8_500_000_999]
    assert (out.count(A.encode()), out.count(B.encode())) == (1, 4)


def test_nothing_is_kept_of_an_address_that_a_newcomer_may_take() -> None:
    past = timeline_of()
    clocks = ClockMap([Instant(1, 1, 1, 1)])

    def follow(until: int) -> tuple[int, ClockMap]:
        if until > 6 * SECOND:
            past.apply(load(PLACE, 64, A, 6 * SECOND))
        return until, clocks

    line = LINE.replace(b"([unknown])", b"([kernel.kallsyms])")
    text = sample("5.500000", line) + sample("5.600000", line) + sample("6.500000", line)
    out = annotated(text, Renamer(past, clocks, "monotonic", follow=follow))
    assert out == text[: 2 * len(text) // 3] + sample("6.500000", NAMED % A.encode())


def test_a_reader_that_goes_is_no_error(recorded: str) -> None:
    child = ksym("annotate", "-H", recorded, "--clock", "monotonic")
    assert child.stdin and child.stdout and child.stderr
    child.stdout.close()
    try:
        for _ in range(1000):
            child.stdin.write(sample("5.500000") * 1000)
    except BrokenPipeError:
        pass
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(60) == 141


def test_the_running_system_has_to_be_the_text_s() -> None:
    other = b"\tffffffff81000504 [unknown] ([kernel.kallsyms])\n"
    agrees = b"\tffffffff81000404 alpha+0x4 ([kernel.kallsyms])\n"
    differs = b"\tffffffff81000404 alpha+0x8 ([kernel.kallsyms])\n"
    named = other.replace(b"[unknown]", b"beta+0x4")

    def by(doubt: bool) -> Renamer:
        return Renamer(None, None, None, lambda: (None, statics()), doubt)

    assert annotated(sample("5.5", other + agrees), by(True)) == sample("5.5", named + agrees)
    assert annotated(sample("5.5", other + agrees), by(False)) == sample("5.5", named + agrees)
    for doubt in (True, False):
        renames = by(doubt)
        text = sample("5.5", other + differs)
        assert annotated(text, renames) == text
        assert "not this kernel's" in renames.report()[-1]
    assert annotated(sample("5.5", other), by(False)) == sample("5.5", named)
    renames = by(True)
    assert annotated(sample("5.5", other), renames) == sample("5.5", other)
    assert "nothing in the text" in renames.report()[-1]
    # What comes later may show it.
    later = sample("5.5", other) + sample("5.6", other + agrees)
    assert annotated(later, by(True)).count(b"beta") == 1


def test_frames_are_counted_as_the_handler_counts_them() -> None:
    by = renamer(one_place(), TABLE)
    text = (
        sample("5.500000", LINE + b"\tffffffff81000404 alpha+0x4 ([kernel.kallsyms])\n")
        + sample("6.500000", NAMED % A.encode())
        + sample("6.500000", NAMED % B.encode())
        + sample("6.500000", b"\tffffffffa0000000 [unknown] ([unknown])\n\t401000 main (/x)\n") * 2
    )
    annotated(text, by)
    tally = by.tally
    assert (tally.added, tally.confirmed, tally.renamed, tally.bpf) == (1, 2, 1, 3)
    assert sum(tally.unknown.values()) == 2


_PIECES = st.sampled_from(
    [
        b"\n",
        b"\n\n",
        b"\r\n",
        b"\t",
        b" ",
        LINE,
        b"demo  77 [000] 5.500000:  1 cycles: \n",
        b"demo  77 [000] 6.500000:  1 cycles:",
        b"java 19 cycles:\n",
        b"\tffffffff81000404 alpha+0x4 ([kernel.kallsyms])\n",
        b"ffffffffc0001004 [unknown] ([unknown])",
        b"\tffffffffc0001008 (x) ((y)",
        b"# comment\n",
        b"(",
        b" (",
        b")",
        b"+0x4",
        b"\0",
        b"\xff\xfe",
        b"5.500000: ",
        b"[unknown]",
        b" => ",
    ]
)
_TEXTS = st.lists(st.one_of(_PIECES, st.binary(max_size=20)), max_size=40).map(b"".join)
#: The addresses that the history of these tests can name.
_REPAIRABLE = re.compile(rb"(ffffffffc00010[0-3][0-9a-f][ \t]).*?(\s*)$", re.DOTALL)


def unrepaired(line: bytes) -> tuple[bytes, bytes]:
    """A line without the range that a repair may change: behind such an address."""
    found = _REPAIRABLE.search(line)
    return (line, b"") if found is None else (line[: found.end(1)], found[2])


@given(_TEXTS, st.integers(1, 200))
@example(b"demo  77 [000] 5.500000:  1 cycles: ffffffffc0001004 [unknown] ([unknown])\r\n", 7)
@settings(deadline=None, suppress_health_check=SLOW_MACHINE, max_examples=300)
def test_any_bytes_come_out_as_they_went_in_but_for_repaired_symbols(
    text: bytes, piece: int
) -> None:
    assert annotated(text, piece=piece) == text
    repaired = annotated(text, renamer(one_place()), piece)
    before, after = text.split(b"\n"), repaired.split(b"\n")
    assert list(map(unrepaired, before)) == list(map(unrepaired, after))
    assert annotated(text, renamer(one_place())) == repaired  # however it is cut


@given(_TEXTS)
@settings(deadline=None, suppress_health_check=SLOW_MACHINE, max_examples=100)
def test_repairing_twice_is_repairing_once(text: bytes) -> None:
    once = annotated(text, renamer(one_place()))
    assert annotated(once, renamer(one_place())) == once


@pytest.mark.parametrize(
    "line",
    [
        b"\tffffffffc0001004 " + b"x" * 100_000 + b" (y)",
        b"\tffffffffc0001004 " + b" (" * 200_000 + b")",
        b"\tffffffffc0001004 " + b")" * 200_000 + b" (" * 200_000 + b")",
        b"1 " * 300_000,
        b" " * 500_000 + b"1",
        b"1" * 500_000,
        b"1/" * 250_000 + b":",
        b"1 [1] " * 100_000,
        b"1.000000:" * 60_000,
        b"a 1 " + b"1.000000 " * 60_000 + b"x:",
        b"a 1 1.000000: " + b"ffffffffc0001004 " * 40_000 + b"x (y)",
        b"\0" * 500_000,
        b"x" * (LONGEST + 5),
        b"\r" * 300_000,
    ],
    ids=range(14),
)
def test_hostile_lines_take_linear_time(line: bytes) -> None:
    text = sample("5.500000") + line + b"\n" + sample("5.600000")
    started = time.process_time()
    repaired = annotated(text, renamer(one_place()), 1 << 16)
    # Half a megabyte: some milliseconds. Quadratic work would take minutes.
    assert time.process_time() - started < 5
    assert repaired.endswith(sample("5.600000", NAMED % A.encode()))
    assert len(repaired) > 100_000


def test_a_line_without_end_is_not_held_back() -> None:
    annotator = Annotator(renamer())
    passed = sum(len(annotator.feed(b"x" * (1 << 16))) for _ in range(40))
    assert passed > 38 << 16
    assert annotator.feed(b"\n" + LINE).endswith(b"\n" + LINE)


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    """A history of this boot that holds A from 5.1 s on."""
    path = str(tmp_path / "ksym.db")
    writer = HistoryWriter(path, "made up", 1, None)
    timeline = timeline_of(load(PLACE, 64, A, 5 * SECOND + SECOND // 10))
    for lifetime in timeline.lifetimes():
        writer.note(lifetime)
    writer.close(9 * SECOND)
    return path


def ksym(*words: str, **how: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "ksym_plugin.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, **how)


def test_a_pipe_that_pauses_is_not_held_back(recorded: str) -> None:
    child = ksym("annotate", "-H", recorded, "--clock", "monotonic")
    assert child.stdin and child.stdout and child.stderr
    for number in range(3):
        text = sample(f"5.50000{number}")
        child.stdin.write(text)
        child.stdin.flush()
        # The whole sample, up to its blank line, while the pipe stays open.
        got = b"".join(child.stdout.readline() for _ in range(3))
        assert got == text.replace(LINE, NAMED % A.encode())
    child.stdin.write(b"no line end")
    out, err = child.communicate(timeout=60)
    assert out == b"no line end"
    assert child.returncode == 0
    assert b"ksym: 3 kernel frames: 0 confirmed" in err


def test_a_header_says_which_history_fits(recorded: str) -> None:
    text = b"# hostname : elsewhere\n# os release : 0.0\n" + sample("5.500000")
    out, err = ksym("annotate", "-H", recorded, "--clock", "monotonic").communicate(text, 60)
    assert (out, err.count(b"\n")) == (b"", 1)
    assert b"no record of the kernel this text is from" in err
    host, release = identity.hostname(), identity.release()
    text = f"# hostname : {host}\n# os release : {release}\n".encode() + sample("5.500000")
    out, _ = ksym("annotate", "-H", recorded, "--clock", "monotonic").communicate(text, 60)
    assert out == text.replace(LINE, NAMED % A.encode())


def test_a_header_may_come_in_pieces(recorded: str) -> None:
    child = ksym("annotate", "-H", recorded)
    assert child.stdin and child.stdout
    child.stdin.write(b"# ========\n# captured on : a day\n# ev")
    child.stdin.flush()
    assert not select.select([child.stdout], [], [], 1)[0]  # Which clock is not known yet.
    child.stdin.write(b"ent : name = cycles, use_clockid = 1, clockid = 1\n# ========\n#\n")
    child.stdin.flush()
    # The end of the header is enough to go on.
    assert child.stdout.readline() == b"# ========\n"
    out, _ = child.communicate(sample("5.500000"), 60)
    assert out.endswith(sample("5.500000", NAMED % A.encode()))


def test_a_header_says_which_clock(recorded: str) -> None:
    head = b"# event : name = cycles, , id = { 1 }, type = 1, use_clockid = 1, clockid = %d\n"
    text = head % 1 + sample("5.500000")
    out, _ = ksym("annotate", "-H", recorded).communicate(text, 60)
    assert out == text.replace(LINE, NAMED % A.encode())
    out, err = ksym("annotate", "-H", recorded).communicate(head % 4 + sample("5.500000"), 60)
    assert out == b""
    assert b"a clock that a history cannot place; record with: perf record -k" in err


def test_samples_without_a_time_are_said() -> None:
    by = renamer(one_place())
    text = b"app 7 cycles:\n" + NAMED % A.encode() + b"\n"
    annotated(text + text, by)
    assert any(
        "2 samples have no time, by which BPF frames are named" in line for line in by.report()
    )
    again = renamer(one_place())
    annotated(sample("6.500000", NAMED % A.encode()), again)
    assert not any("no time" in line for line in again.report())


def test_a_loss_that_becomes_known_later_marks_what_was_certain(tmp_path: Path) -> None:
    path = str(tmp_path / "h.db")
    writer = HistoryWriter(path, "test", 0, None)
    writer.note(Lifetime(load(PLACE, 64, A, SECOND)))
    writer.commit(20 * SECOND)
    clocks = ClockMap(())
    with History(path) as history:
        (boot,) = history.boots()
        past = history.recorded(boot)

        def follow(until: int) -> tuple[int, ClockMap]:
            if until > 20 * SECOND:
                writer.lost(Loss(4 * SECOND, 6 * SECOND, "noticed late"))
                writer.commit(40 * SECOND)
                past.wait_covered(until)
            return max(session.covered for session in past.sessions), clocks

        by = Renamer(past, clocks, "monotonic", follow=follow)
        text = b"".join(sample(f"{at}.000000000") for at in (2, 3, 5))
        other = LINE.replace(b"1004", b"1008")
        text += sample("30.000000000", other) + sample("5.000000000")
        text = annotated(text, by)
    writer.close(40 * SECOND)
    names = re.findall(rb"ffffffffc0001004 (\S+)\+", text)
    assert names == [A.encode()] * 3 + [A.encode() + b"?"]


@given(
    histories(),
    st.lists(st.sampled_from([-900_000, 0, 1, 700_000, 5_000_000]), min_size=1, max_size=5),
    st.sampled_from([9, 6]),
    st.one_of(st.none(), st.randoms(use_true_random=False)),
)
@settings(deadline=None, suppress_health_check=SLOW_MACHINE, max_examples=100)
def test_what_is_kept_of_stacks_holds_when_it_is_used(
    held: list[Held], steps: list[int], digits: int, shuffled: random.Random | None
) -> None:
    """Samples around each change, on a clock that drifts and is set: named by what was there.

    Whole samples come from what was kept; by line each frame is decided on.
    """
    ends = [one.unloaded for one in held if one.unloaded is not None]
    changes = sorted({one.loaded for one in held} | set(ends))
    instants, behind = [], 1_000
    for number, step in enumerate(steps):
        behind += step
        at = number * 2_000_000_000 + 7
        instants.append(Instant(at, at, at, at + behind))
    clocks = ClockMap(instants)
    times = sorted({max(1, at + by) for at in changes for by in (-1, 0, 1, 2, 1_500_000_000)})
    if shuffled is not None:
        shuffled.shuffle(times)
    places = sorted({one.start for one in held})
    text, truth = b"", []
    for instant in times:
        shown = clocks.from_monotonic(PERF, instant)
        if shown < 0:
            continue
        stamp = b"%d.%09d" % divmod(shown, 1_000_000_000)
        for place in places:
            text += b"demo  77 [000] %s:  1 cycles: \n" % stamp[: digits - 9 or None]
            text += b"\t%x [unknown] ([unknown])\n\n" % (place + 2)
            name = [one.name for one in held if one.holds(place + 2, instant)]
            is_known = digits == 9 and clocks.to_monotonic(PERF, shown) == instant
            truth.append(name[0] if name and is_known else None)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "h.db")
        writer = HistoryWriter(path, "test", 0, None)
        for one in held:
            lifetime = Lifetime(one.load())
            lifetime.unloaded_earliest = lifetime.unloaded_latest = one.unloaded
            writer.note(lifetime)
        writer.close(1 << 50)
        with History(path) as history:
            (boot,) = history.boots()
            recorded = history.recorded(boot)
            whole = annotated(text, Renamer(recorded, clocks, PERF))
            assert whole == annotated(text, Renamer(recorded, clocks, PERF), piece=1)
    names = re.findall(rb"^\t\S+ (\S+?)(?:\+0x[0-9a-f]+)? ", whole, re.MULTILINE)
    assert len(names) == len(truth)
    for name, true in zip(names, truth):
        assert true is None or name.decode().rstrip("?") in (true, "[unknown]")

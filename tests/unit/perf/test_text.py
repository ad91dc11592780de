"""The grammar of perf script text, line by line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.perf import text
from ksym_plugin.perf.text import LONGEST, Cutter
from tests.unit.texts import corpus


@pytest.mark.parametrize(
    "line, comm, pid, tid, window, period, event, payload",
    [
        (
            b"swapper     0 [000]    12.000001:     250000 cycles:P:  ",
            b"swapper",
            b"",
            b"0",
            (12_000_001_000, 12_000_001_999),
            b"250000",
            b"cycles:P",
            b"",
        ),
        (
            b"a/b 1/2 0.000000001: cpu-clock: ",
            b"a/b",
            b"1",
            b"2",
            (1, 1),
            b"",
            b"cpu-clock",
            b"",
        ),
        (
            b"1/2 47170.086912805:   1   branches:uH:   jcc   40ac3f a+0x1 (x) => 40 b (x)",
            b"",
            b"1",
            b"2",
            (47_170_086_912_805,) * 2,
            b"1",
            b"branches:uH",
            b"jcc   40ac3f a+0x1 (x) => 40 b (x)",
        ),
        (
            b"swapper 5.000000: cycles: ",
            b"swapper",
            b"",
            b"",
            (5 * 10**9, 5 * 10**9 + 999),
            b"",
            b"cycles",
            b"",
        ),
        (b"t 7 5.000000: ", b"t", b"", b"7", (5 * 10**9, 5 * 10**9 + 999), b"", b"", b""),
        (b"t 7 [001] cycles:u:", b"t", b"", b"7", None, b"", b"cycles:u", b""),
        (b"t 7/8 cycles:", b"t", b"7", b"8", None, b"", b"cycles", b""),
        (b"t 7 " + b"9" * 30 + b".5: 1 e:", b"t", b"", b"7", None, b"1", b"e", b""),
        # A name that looks like the header it stands in.
        (
            b"a 1 2.000000: 33 [001] 5.000000: 1 e: ",
            b"a 1 2.000000:",
            b"",
            b"33",
            (5 * 10**9, 5 * 10**9 + 999),
            b"1",
            b"e",
            b"",
        ),
        # Such a thing in a payload is none.
        (
            b"a 1 5.000000: 1 e: x 33 [001] 6.000000: 1 f: ",
            b"a",
            b"",
            b"1",
            (5 * 10**9, 5 * 10**9 + 999),
            b"1",
            b"e",
            b"x 33 [001] 6.000000: 1 f:",
        ),
        (
            b"a longer name than the kernel has 1 5.000000: 1 e: ",
            b"a longer name than the kernel has",
            b"",
            b"1",
            (5 * 10**9, 5 * 10**9 + 999),
            b"1",
            b"e",
            b"",
        ),
    ],
)
def test_headers(
    line: bytes,
    comm: bytes,
    pid: bytes,
    tid: bytes,
    window: tuple[int, int] | None,
    period: bytes,
    event: bytes,
    payload: bytes,
) -> None:
    header = text.header(line)
    assert header is not None
    assert (header.comm, header.pid, header.tid) == (comm, pid, tid)
    assert header.window(line) == window
    assert (header.period, header.event, header.payload) == (int(period or b"1"), event, payload)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b":",
        b"cycles:",
        b"7 cycles:",
        b"t x cycles:",
        b"t 7/x cycles:",
        b"the time is 5.000000",
        b" instruction trace error type 1 time 2472089.651285037 cpu -1 pid 14 ip 0x7f (foo.so)",
        b"t 0 [000] 5.000000: PERF_RECORD_LOST lost 5",
        b"t 0 5.000000: PERF_RECORD_COMM: a:1/1",
    ],
)
def test_what_is_no_header(line: bytes) -> None:
    assert text.header(line) is None


@pytest.mark.parametrize(
    "line, name, offset, dso",
    [
        (b"\tffffffff81000404 f+0x4 ([kernel.kallsyms])", b"f", b"+0x4", b"[kernel.kallsyms]"),
        (b"ffffffff81000404 f (x)\r", b"f", b"", b"x"),
        (b"\t               0 [unknown] ([unknown])", b"[unknown]", b"", b"[unknown]"),
        (b"\t 7f1e2215d058  (/lib/libc.so)", b"", b"", b"/lib/libc.so"),
        (b"\t 1 f+0x (x)", b"f+0x", b"", b"x"),
        (b"\t 1 f+0xg (x)", b"f+0xg", b"", b"x"),
        (b"\t 1 a (b) (c (d))", b"a (b)", b"", b"c (d)"),
        (b"\t 1 a (b) c) d)", b"a", b"", b"b) c) d"),
        (b"\tffffffff81000404 f+0x4", b"f", b"+0x4", None),
        (b"\tffffffff81000404 f\0[bpf]+0x4 (y)", b"f\0[bpf]", b"+0x4", b"y"),
    ],
)
def test_frames(line: bytes, name: bytes, offset: bytes, dso: bytes | None) -> None:
    frame = text.frame(line)
    assert frame is not None
    assert (frame.name, frame.offset, frame.dso) == (name, offset, dso)
    rest = line.rstrip()[frame.name_at :].strip()
    shown = name + offset + (b" (" + dso + b")" if dso is not None else b"")
    assert rest == shown.strip()
    assert frame.end == len(line.rstrip())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\tNOT_A_FRAME",
        b"\txffffffff81000404 f (x)",
        b"\tffffffff81000404",
        b"\tffffffff81000404f (x)",
        b"\t11111222223333344 f (x)",
        b" 81000404 f+0x4",
        b"deadbeef is no address",
        b"\tFFFFFFFF81000404 f (x)",
    ],
)
def test_what_is_no_frame(line: bytes) -> None:
    assert text.frame(line) is None


@given(st.binary(max_size=80), st.booleans())
def test_any_line_is_read(line: bytes, is_start: bool) -> None:
    parsed = text.parse(line, is_start)
    if isinstance(parsed, text.FrameLine):
        assert 0 <= parsed.name_at <= parsed.end <= len(line)
        assert int(line[: parsed.name_at].split()[-1], 16) == parsed.address
    elif parsed is not None:
        assert parsed.window() is None or parsed.window()[0] <= parsed.window()[1]  # type: ignore[index]
        text.payload_frame(line, parsed.payload)


@pytest.mark.parametrize("path", corpus())
def test_the_corpus_holds_little_else(path) -> None:
    """Of the lines, all are headers, frames, blank, comments, or known to be something else."""
    odd = [
        line
        for line in path.read_bytes().split(b"\n")
        if line.strip() and not line.startswith(b"#") and text.parse(line, False) is None
    ]
    for line in odd:
        assert line.strip().startswith((b"address", b"stray", b"instruction trace", b"t 6 ")), line


@given(st.binary(max_size=60), st.lists(st.integers(1, 9), max_size=30))
def test_lines_are_cut_out_whole(data: bytes, sizes: list[int]) -> None:
    cutter, got, at = Cutter(), b"", 0
    for size in [*sizes, len(data) or 1]:
        before, whole, after = cutter.cut(data[at : at + size])
        at += size
        assert (before, after) == (b"", b"")
        assert whole == b"" or whole.endswith(b"\n")
        got += whole
    rest = cutter.rest()
    assert b"\n" not in rest
    assert got + rest == data


def test_what_is_too_long_for_a_line_passes() -> None:
    cutter = Cutter()
    assert cutter.cut(b"a\nb\n" + b"x" * LONGEST) == (b"", b"a\nb\n", b"")
    assert cutter.cut(b"yy") == (b"", b"", b"x" * LONGEST + b"yy")
    assert cutter.cut(b"z") == (b"z", b"", b"")
    assert cutter.cut(b"z\nnext\nbegun") == (b"z\n", b"next\n", b"")
    assert cutter.rest() == b"begun"


_COMMS = st.sampled_from(
    [b"a", b"5.000000:", b"x 7 1.5: y", b"py3.11", b"w [1]", b"", b"\t1.5", b"1"]
)
_STAMPS = st.sampled_from(
    [
        b"5.500000",
        b"6.500000",
        b"1705.500000",
        b"17055.00000",
        b"5.5",
        b"17.000000001",
        b"x.5",
        b"5.5.5",
    ]
)
_BEHIND = st.sampled_from(
    [b":  3 cycles: ", b": e/a=1.5/: ", b":", b"", b": PERF_RECORD_X", b": 7 e: 1.5:"]
)


@given(st.lists(st.tuples(_COMMS, _STAMPS, _BEHIND), max_size=12))
@settings(deadline=None)
def test_headers_are_found_as_they_are_read(parts: list[tuple[bytes, bytes, bytes]]) -> None:
    def told(header: text.Header | None, line: bytes) -> object:
        slots = text.Header.__slots__
        return header and [header.window(line), *(getattr(header, slot) for slot in slots)]

    headers = text.Headers()
    for comm, stamp, behind in parts:
        line = comm + b" 7/8 [000] " + stamp + behind
        assert told(headers.find(line), line) == told(text.header(line), line)


def test_what_is_like_a_time_behind_the_time_is_the_line_s_own() -> None:
    headers = text.Headers()
    for event in (b"5.1", b"5.2"):
        found = headers.find(b"a 7 5.600000: %s: x" % event)
        assert found is not None and found.event == event


@given(
    st.sampled_from([b"f", b"[unknown]", b"a (b) c", b"", b" x", b"f+0x1 g", b"operator new"]),
    st.sampled_from([b"", b"+0x1f", b"+0x", b"+0xg", b" +0x1"]),
    st.sampled_from([b"/bin/x", b"/memfd:a (deleted)", b"", b"[k]", b"/a (1) +0x2 (b"]),
)
def test_a_frame_is_read_alike_whatever_blanks_follow(
    name: bytes, offset: bytes, dso: bytes
) -> None:
    line = b"\t    7f0000401000 " + name + offset + b" (" + dso + b")"
    one, other = text.frame(line), text.frame(line + b" ")
    assert one is not None and other is not None
    slots = text.FrameLine.__slots__
    assert [getattr(one, slot) for slot in slots] == [getattr(other, slot) for slot in slots]


def test_long_headers_are_not_kept() -> None:
    headers = text.Headers()
    for number in range(50):
        line = b"app 1 [000] 5.%09d: x:y: " % number + b"%d" % number * 100_000
        found = headers.find(line)
        assert found is not None and found.event == b"x:y"
    kept = sum(len(part) for key in headers._kept for part in key[:2])
    assert kept < 10_000

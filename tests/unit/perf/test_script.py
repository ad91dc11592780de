"""``ksym script``: perf's options parted, and what is done to perf's text."""

from __future__ import annotations

import pytest

from ksym_plugin.kernel.clocks import ClockMap, Instant
from ksym_plugin.perf import text
from ksym_plugin.perf.data import Recorded
from ksym_plugin.perf.script import Request, Selection, clocks
from ksym_plugin.perf.session import Session
from ksym_plugin.timeline.errors import KsymError

ASKED = ["--ns"]

SAMPLES = b"""app 77 [000]  5741.000001234:     250000 cpu-clock: {}
\tffffffff81000010 do_it+0x10 ([kernel.kallsyms])
\tffffffff81000110 caller+0x10 ([kernel.kallsyms])
\t    55d0c0de1150 main+0x67 (/opt/app)

app 78 [001]  5741.000999999:          1 page-faults: {}
\tffffffffc0000010 bpf_prog_1122334455667788_x+0x10 ([bpf])
\tffffffff81000110 caller+0x10 ([kernel.kallsyms])

""".replace(b"{}", b"")


def passed(data: bytes, *options: str, event: bytes | None = None, size: int = 1 << 20) -> bytes:
    """What a selection leaves of a text that comes in pieces."""
    selection = Selection(Request(options), event)
    pieces = [selection.feed(data[at : at + size]) for at in range(0, len(data), size)]
    return b"".join([*pieces, selection.close()])


def test_a_selection_prints_the_times_of_records_as_perf_does() -> None:
    record = b"app 77/78  5741.000999999: PERF_RECORD_COMM: app:77/78\n"
    shown = record.replace(b"999999:", b"999:")
    assert passed(record, event=b"cycles").startswith(shown)
    assert passed(record, "--ns", event=b"cycles") == record


@pytest.mark.parametrize(
    "options, perf, hidden",
    [
        ((), [], set()),
        (("--comms", "a,b", "-C", "1"), ["--comms", "a,b", "-C", "1"], set()),
        (("-F", "comm,ip,sym,dso,time"), ["-F", "comm,ip,sym,dso,time"], set()),
        (("-F", "comm,ip,sym"), ["-F", "comm,ip,sym,time,dso"], {"time", "dso"}),
        (("-Fcomm,ip,sym,dso",), ["-F", "comm,ip,sym,dso,time"], {"time"}),
        (("--fields=sw:comm,ip,sym,dso",), ["-F", "sw:comm,ip,sym,dso,time"], {"time"}),
        (("--field", "+srcline"), ["-F", "+srcline"], set()),
        (("-F", "-time,+pid"), ["-F", "+time,+pid"], {"time"}),
        (("-F", "-dso"), ["-F", "+dso"], {"dso"}),
        # No names are printed, so there is nothing to repair.
        (("-F", "comm,ip"), ["-F", "comm,ip"], set()),
        (("-fF", "time,event"), ["-f", "-F", "time,event"], set()),
    ],
)
def test_what_a_repair_needs_is_asked_for_and_noted(options, perf, hidden) -> None:
    request = Request(options)
    assert request.options == perf + ASKED
    assert request.hidden == hidden


def test_options_that_work_on_names_are_not_perf_s() -> None:
    request = Request(["-S", "a,b", "--symbols=c", "--stop-bt", "d", "--reltime", "-v"])
    assert request.options == ["-v", *ASKED]
    assert request.symbols == {b"a", b"b", b"c"}
    assert request.stops == {b"d"}


@pytest.mark.parametrize(
    "options, says",
    [
        (("-s", "x.py"), "perf script -s"),
        (("-g", "python"), "perf script -g"),
        (("--per-event-dump",), "--event NAME"),
        (("-F",), "needs a value"),
        (("report", "x"), "no option of perf script"),
        (("-F", "sw:comm,ip,sym", "-F", "hw:comm,ip,sym,time"), "some kinds of events"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(options, says) -> None:
    with pytest.raises(KsymError, match=says):
        Request(options)


@pytest.mark.parametrize(
    "options, first, second",
    [
        ((), b"5741.000001: ", b"5741.000999: "),
        (("--ns",), b"5741.000001234: ", b"5741.000999999: "),
        (("--reltime",), b"   0.000000: ", b"   0.000998: "),
        (("--deltatime", "--ns"), b"   0.000000000: ", b"   0.000998765: "),
        (("-F", "comm,tid,cpu,event,period,ip,sym,dso"), b"", b""),
    ],
)
def test_times_are_printed_as_perf_would_have(options, first, second) -> None:
    heads = [b"app 77 [000]  ", b"app 78 [001]  "]
    if not first:
        heads = [head[:-1] for head in heads]
    lines = passed(SAMPLES, *options).split(b"\n")
    assert lines[0] == heads[0] + first + b"    250000 cpu-clock: "
    assert lines[5] == heads[1] + second + b"         1 page-faults: "


def test_a_task_that_is_named_like_a_time_keeps_its_name() -> None:
    line = b"1.123456789: x 77 [000]  5741.000001234:     250000 cpu-clock: "
    header = text.header(line)
    assert header is not None
    assert Request(()).times.format(line, len(line) - header.behind) == line.replace(
        b"001234", b"001"
    )


@pytest.mark.parametrize("options", [(), ("--ns",), ("--reltime",), ("-F", "ip,sym")])
@pytest.mark.parametrize("line", [b"12.5 6 a.b: ", b"a.bcd 7 1.2: c:", b"5 6 a.b 7 1.5: c:"])
def test_a_time_that_perf_does_not_print_stays(options: tuple[str, ...], line: bytes) -> None:
    """A task's name can hold a line end, and what a program prints to a tracepoint too."""
    header = text.header(line)
    assert header is not None
    assert Request(options).times.format(line, len(line) - header.behind) == line


def test_a_time_that_no_clock_shows_stays() -> None:
    line = b"x 7 %s.123456789: c:\n" % (b"9" * 5000)
    assert passed(line, "--reltime") == line


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    "options, event, kept",
    [
        (("-S", "do_it"), None, [0]),
        (("-S", "bpf_prog_1122334455667788_x,nobody"), None, [1]),
        (("-S", "0xffffffff81000000"), None, [0]),
        (("-S", "caller"), None, []),
        ((), b"cpu-clock", [0]),
        ((), b"page-faults", [1]),
    ],
)
def test_samples_are_chosen_by_their_leaf_and_their_event(options, event, kept, size) -> None:
    samples = [sample + b"\n\n" for sample in SAMPLES.split(b"\n\n")[:-1]]
    wanted = b"".join(samples[at] for at in kept)
    assert passed(SAMPLES, "--ns", *options, event=event, size=size) == wanted


def test_callers_are_printed_up_to_one() -> None:
    left = passed(SAMPLES, "--ns", "--stop-bt", "do_it,bpf_prog_1122334455667788_x")
    assert left.count(b"caller") == 0
    assert left.count(b"do_it") == left.count(b"bpf_prog_") == 1
    assert left.count(b"\n\n") == 2


def test_an_event_that_is_not_there_is_told() -> None:
    with pytest.raises(KsymError, match="cpu-clock, page-faults"):
        passed(SAMPLES, event=b"cycles")


@pytest.mark.parametrize(
    "options, event, says",
    [
        (("-S", "do_it", "-F", "comm,tid,time"), None, "-F leaves out"),
        (("--stop-bt", "do_it", "-F", "-sym"), None, "-F leaves out"),
        (("-F", "comm,ip,sym"), "cycles", "add event"),
    ],
)
def test_what_is_looked_for_has_to_be_printed(options, event, says) -> None:
    with pytest.raises(KsymError, match=says):
        Request(options).refuse_event(event)


def attr(clockid: int) -> bytes:
    """A perf_event_attr with use_clockid, bit 25 of the flags."""
    raw = bytearray(136)
    raw[40:48] = (1 << 25).to_bytes(8, "little")
    raw[92:96] = clockid.to_bytes(4, "little")
    return bytes(raw)


@pytest.mark.parametrize(
    "clockids, found",
    [
        ({"cycles": 1}, "monotonic"),
        ({"cycles": 1, "page-faults": 1}, "monotonic"),
        ({"cycles": 1, "page-faults": 7}, {b"cycles": "monotonic", b"page-faults": "boottime"}),
        ({"cycles": 1, "raw": 4}, {b"cycles": "monotonic"}),
    ],
)
def test_one_clock_is_that_of_lines_without_an_event_too(clockids, found) -> None:
    recorded, known = Recorded(), Session(None, False)
    recorded.attrs = {event: attr(number) for event, number in clockids.items()}
    known.clock_map = ClockMap([Instant(1, 1, 1, 1)])
    assert clocks(recorded, known, None) == found
    assert clocks(recorded, known, "perf") == "perf"

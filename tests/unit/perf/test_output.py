"""perf script's text, against lines that perf printed."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.perf.data import user_maps
from ksym_plugin.perf.output import TextOutput, say
from tests.unit.perf_events import CALLCHAIN, SAMPLED, SECOND, TIME, attr, event, node
from tests.unit.perf_files import GUEST_USER_MODE, MMAP, MMAP2, USER_MODE, PerfFile

PLAIN = attr(sample_type=SAMPLED & ~CALLCHAIN)
TIMELESS = attr(sample_type=SAMPLED & ~TIME)
TRACEPOINT = attr(kind=2)


def text_of(*events: dict[str, Any], width: int = 0) -> str:
    stream = io.StringIO()
    output = TextOutput(stream, width)
    for one in events:
        output.sample(one, [output.user(entry) for entry in one["callchain"]])
    output.close()
    return stream.getvalue()


def header_of(width: int = 0, **changed: Any) -> str:
    changed = {"time": 9608_304613_671, **changed}
    return text_of(event(**changed), width=width).partition("\n")[0]


@pytest.mark.parametrize(
    "changed, header",
    [
        ({}, "demo     8  9608.304613:     250000 cpu-clock: "),
        ({"tid": 1201}, "demo  1201  9608.304613:     250000 cpu-clock: "),
        ({"tid": 4194304}, "demo 4194304  9608.304613:     250000 cpu-clock: "),
        ({"tid": (1 << 32) - 1}, "demo    -1  9608.304613:     250000 cpu-clock: "),
        ({"cpu": 0}, "demo     8 [000]  9608.304613:     250000 cpu-clock: "),
        ({"cpu": 1023}, "demo     8 [1023]  9608.304613:     250000 cpu-clock: "),
        ({"time": 0}, "demo     8     0.000000:     250000 cpu-clock: "),
        ({"time": 999}, "demo     8     0.000000:     250000 cpu-clock: "),
        ({"time": 123456 * SECOND}, "demo     8 123456.000000:     250000 cpu-clock: "),
        ({"period": 1}, "demo     8  9608.304613:          1 cpu-clock: "),
        ({"period": 10**12}, "demo     8  9608.304613: 1000000000000 cpu-clock: "),
        ({"comm": ""}, "     8  9608.304613:     250000 cpu-clock: "),
        ({"comm": "a b [1]: 2"}, "a b [1]: 2     8  9608.304613:     250000 cpu-clock: "),
        ({"ev_name": "sched:x"}, "demo     8  9608.304613:     250000 sched:x: "),
        ({"attr": TIMELESS}, "demo     8     250000 cpu-clock: "),
        ({"attr": TRACEPOINT, "ev_name": "a:b"}, "demo     8  9608.304613: a:b: "),
        ({"attr": None}, "demo     8  9608.304613:     250000 cpu-clock: "),
        ({"attr": b"short"}, "demo     8  9608.304613:     250000 cpu-clock: "),
        ({"map_pgoff": 0}, "demo       8  9608.304613:     250000 cpu-clock: "),
    ],
)
def test_headers(changed: dict[str, Any], header: str) -> None:
    assert header_of(**changed) == header


def test_names_of_events_are_aligned_to_the_longest() -> None:
    assert header_of(10) == "demo     8  9608.304613:     250000  cpu-clock: "
    assert header_of(10, ev_name="task-clock").endswith("250000 task-clock: ")


def test_without_a_thread_perf_has_a_name_for_it() -> None:
    one = event()
    del one["comm"]
    assert text_of(one).startswith(":-1     8 ")


def test_callchains() -> None:
    chain = (
        node(0x7F1A_99FC_A645, "handle_amd", 0x25, "/lib/ld.so", base=0x7F1A_99FA_6000),
        node(0x7F38_3FE8_81E0),
        node(0),
        node(0x20A07, "a+0x1(b)", 0, ""),
    )
    assert text_of(event(*chain, time=SECOND), event(time=SECOND)) == (
        "demo     8     1.000000:     250000 cpu-clock: \n"
        "\t           24645 handle_amd+0x25 (/lib/ld.so)\n"
        "\t    7f383fe881e0 [unknown] ([unknown])\n"
        "\t               0 [unknown] ([unknown])\n"
        "\t           20a07 a+0x1(b)+0x0 ()\n"
        "\n"
        "demo     8     1.000000:     250000 cpu-clock: \n"
        "\n"
    )


@pytest.mark.parametrize("form", ["file", "pipe"])
@pytest.mark.parametrize("order", "<>")
def test_a_user_frame_without_a_symbol_is_printed_by_its_place_in_the_file(
    tmp_path: Path, form: str, order: str
) -> None:
    file = PerfFile(order=order)

    def mapped(
        kind: int,
        start: int,
        offset: int,
        name: bytes,
        misc: int = USER_MODE,
        pid: int = 7,
        size: int = 0x2000,
    ) -> None:
        rest = bytes(32) if kind == MMAP2 else b""
        text = name + bytes(8 - len(name) % 8)
        file.add(kind, file.pack("iiQQQ", pid, pid, start, size, offset) + rest + text, misc)

    mapped(MMAP, 0x7F00_0000_0000, 0x3000, b"/x/lib")
    mapped(MMAP2, 0x7F00_0001_0000, 0x5000, b"/x/lib")
    mapped(MMAP2, 0x7F00_0002_0000, 0x1000, b"//anon")
    # Two processes that had another part of a file at one place: which it was is open.
    mapped(MMAP2, 0x7F00_0003_0000, 0x1000, b"/x/two")
    mapped(MMAP2, 0x7F00_0003_0000, 0x2000, b"/x/two", pid=8)
    # As a program is mapped: whole, and then one of its parts from elsewhere in the file.
    mapped(MMAP2, 0x7F00_0005_0000, 0, b"/x/program", size=0x8000)
    mapped(MMAP2, 0x7F00_0005_4000, 0x3000, b"/x/program")
    mapped(MMAP2, 0x7F00_0005_5000, 0, b"//anon", size=0x1000)
    mapped(MMAP2, 0x7F00_0004_0000, 0x1000, b"/x/guest", GUEST_USER_MODE)
    path = tmp_path / "perf.data"
    path.write_bytes(getattr(file, form)())
    places = [
        (0x7F00_0000_0010, "/x/lib", 0x3010),
        (0x7F00_0001_1FFF, "/x/lib", 0x6FFF),
        (0x7F00_0001_2000, "/x/lib", 0x7F00_0001_2000),
        (0x7F00_0000_0010, "/x/other", 0x7F00_0000_0010),
        (0x7F00_0002_0010, "//anon", 0x7F00_0002_0010),
        (0x7F00_0003_0010, "/x/two", 0x7F00_0003_0010),
        (0x7F00_0004_0010, "/x/guest", 0x7F00_0004_0010),
        (0x7F00_0005_3010, "/x/program", 0x3010),
        (0x7F00_0005_4010, "/x/program", 0x3010),
        (0x7F00_0005_5010, "/x/program", 0x7F00_0005_5010),
        (0x7F00_0005_6010, "/x/program", 0x6010),
    ]
    output = TextOutput(io.StringIO(), 0, lambda: user_maps(str(path)))
    for address, name, shown in places:
        assert output.user(node(address, dso=name)) == f"\t{shown:16x} [unknown] ({name})\n"


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(0, 5), st.sampled_from("ab")),
        max_size=12,
    )
)
def test_the_last_map_of_a_process_over_an_address_is_the_one_there(
    maps: list[tuple[int, int, int, str]],
) -> None:
    file, there = PerfFile(), {}
    for first, size, offset, name in maps:
        start = 0x1000 + first
        text = f"/{name}".encode().ljust(8, b"\0")
        file.add(MMAP, file.pack("iiQQQ", 7, 7, start, size, 64 * offset) + text, USER_MODE)
        there.update({start + at: (f"/{name}", 64 * offset + at) for at in range(size)})
    with tempfile.NamedTemporaryFile() as data:
        data.write(file.file())
        data.flush()
        found = {
            address: (name, address - start + offset)
            for name, places in user_maps(data.name).items()
            for start, end, offset in places
            for address in range(start, end)
        }
    assert found == there


def test_functions_that_perf_shows_as_inlined() -> None:
    """As perf 6.1 printed such a stack, and one of a function that calls itself."""
    base = 0x55B3_0000_0000
    inner = [node(base + 0x1185, name, 0x25, "/h/a", base=base) for name in ("f", "g", "outer")]
    again = [node(base + 0x1300, "again", 0x10, "/h/a", base=base)] * 2
    assert text_of(event(*inner, *again, node(base + 0x1059, "main", 0x19, "/h/a", base=base))) == (
        "demo     8     1.000000:     250000 cpu-clock: \n"
        "\t            1185 f+0x25 (inlined)\n"
        "\t            1185 g+0x25 (inlined)\n"
        "\t            1185 outer+0x25 (/h/a)\n"
        "\t            1300 again+0x10 (/h/a)\n"
        "\t            1300 again+0x10 (/h/a)\n"
        "\t            1059 main+0x19 (/h/a)\n"
        "\n"
    )


def test_a_chain_that_could_not_be_taken_is_no_frame_as_perf_prints_it() -> None:
    """As perf 6.1 printed a sample of an emulator that has no frame pointers."""
    stream = io.StringIO()
    output = TextOutput(stream)
    lost = event(comm="qemu-system-x86", tid=31486, cpu=1, time=26028_764238_000, period=1003009)
    output.sample(lost, [output.user(node(0x5617C55AA3CE, "helper", 0x10E, "/usr/bin/qemu"))])
    output.close()
    assert stream.getvalue() == (
        "qemu-system-x86 31486 [001] 26028.764238:    1003009 cpu-clock: \n\n"
    )


def test_without_callchains_the_frame_stands_on_the_header_s_line() -> None:
    one = event(node(0x7F1A_99FC_A645, "f", 0x25, "/lib/ld.so"), attr=PLAIN, comm="sh", time=SECOND)
    header = "              sh     8     1.000000:     250000 cpu-clock: "
    assert text_of(one, one) == f"{header}     7f1a99fca645 f+0x25 (/lib/ld.so)\n" * 2
    stream = io.StringIO()
    output = TextOutput(stream, 0, lambda: {"/x": {(0x7000, 0x9000, 0x1000)}})
    output.sample(event(node(0x8000), attr=PLAIN), [output.user(node(0x8000, dso="/x"))])
    output.close()
    assert stream.getvalue().endswith("             8000 [unknown] (/x)\n")
    long = event(node(1), attr=PLAIN, comm="sixteen bytes ok" * 2)
    assert text_of(long).startswith("sixteen bytes oksixteen bytes ok     8 ")


def test_a_name_without_an_offset_is_printed_without_one() -> None:
    entry = {"ip": 0x10, "sym": {"name": "f"}, "dso": "/x"}
    assert "\t              10 f (/x)\n" in text_of(event(entry))


def test_semicolons_of_java_stay() -> None:
    name = "Ldemo/io/Out;::write->Ldemo/Enc;::enc"
    one = event(node(0x7F72_2D11_9786, name, 0x4B, "/tmp/perf-19982.map"))
    assert f" {name}+0x4b (/tmp/perf-19982.map)\n" in text_of(one)


def test_nothing_is_held_back_for_long() -> None:
    stream = io.StringIO()
    output = TextOutput(stream)
    for _ in range(5000):
        output.sample(event(), [])
    assert stream.getvalue()
    output.close()
    assert stream.getvalue() == text_of(event()) * 5000


def test_what_is_said_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\x1b[1m\ntwo")
    assert capsys.readouterr() == ("", "ksym: one[1mtwo\n")

"""Samples of perf.data files written by hand, and of the same files as perf reads them."""

from __future__ import annotations

import contextlib
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.perf import data, data_samples
from ksym_plugin.perf.data import DataError
from ksym_plugin.perf.data_samples import DataSamples
from ksym_plugin.perf.samples import GUEST, HYPERVISOR, KERNEL, USER, Sample
from tests.unit import perf_files as pf
from tests.unit.perf_files import PerfEvent, PerfFile

K1, K2, U1 = 0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_C010_0000, 0x5555_0000_1000
IN_KERNEL, IN_USER = 2**64 - 128, 2**64 - 512
CHAIN = (IN_KERNEL, K1, K2, IN_USER, U1)
FORMS = [(order, form) for order in "<>" for form in ("file", "pipe")]


def read(folder: Path, content: bytes) -> list[Sample]:
    return read_all(folder, content)[0]


def read_all(folder: Path, content: bytes) -> tuple[list[Sample], DataSamples]:
    path = folder / "perf.data"
    path.write_bytes(content)
    with DataSamples(str(path)) as found:
        return list(found.samples()), found


def refusal(folder: Path, content: bytes) -> str:
    with pytest.raises(DataError) as caught:
        read(folder, content)
    return caught.value.problem


@pytest.mark.parametrize("order, form", FORMS)
def test_all_that_a_sample_says(tmp_path: Path, order: str, form: str) -> None:
    file = PerfFile(PerfEvent("cpu-clock:u"), order=order)
    file.comm(10, 11, b"work", time=5)
    file.sample(ip=K1, pid=10, tid=11, time=1 << 40, cpu=3, period=777, chain=CHAIN)
    (sample,), found = read_all(tmp_path, getattr(file, form)())
    assert (sample.comm, sample.pid, sample.tid, sample.cpu) == ("work", 10, 11, 3)
    assert (sample.time, sample.period) == (1 << 40, 777)
    assert (sample.event.name, sample.event.clock) == ("cpu-clock:u", "perf")
    assert sample.frames() == ((K1, KERNEL), (K2, KERNEL), (U1, USER))
    assert found.recorded.arch == "x86_64"


@pytest.mark.parametrize("order, form", FORMS)
@pytest.mark.parametrize("clockid, clock", [(1, "monotonic"), (7, "boottime"), (4, None)])
def test_the_clock_of_an_event(
    tmp_path: Path, order: str, form: str, clockid: int, clock: str | None
) -> None:
    file = PerfFile(PerfEvent(flags=(pf.USE_CLOCKID,), clockid=clockid), order=order)
    file.sample(ip=U1)
    (sample,) = read(tmp_path, getattr(file, form)())
    assert sample.event.clock == clock


@pytest.mark.parametrize(
    "mode, chain, regions",
    [
        (pf.KERNEL_MODE, (), [(K1, KERNEL)]),
        (pf.USER_MODE, (), [(K1, USER)]),
        (pf.HYPERVISOR_MODE, (), [(K1, HYPERVISOR)]),
        (pf.GUEST_KERNEL_MODE, (), [(K1, GUEST)]),
        (pf.GUEST_USER_MODE, (), [(K1, GUEST)]),
        (0, (), [(K1, KERNEL)]),
        (pf.KERNEL_MODE, (IN_KERNEL,), [(K1, KERNEL)]),
        (pf.USER_MODE, (IN_USER,), [(K1, USER)]),
        # Without markers the cpumode tells whose the first frames are.
        (pf.KERNEL_MODE, (K2, U1, K1), [(K2, KERNEL), (U1, USER), (K1, USER)]),
        (pf.USER_MODE, (K2, U1), [(K2, USER), (U1, USER)]),
        (pf.GUEST_KERNEL_MODE, (K2, K1, K2, K1), [(K2, GUEST), (K1, GUEST)] * 2),
    ],
)
@pytest.mark.parametrize("order", "<>")
def test_what_the_cpumode_says(
    tmp_path: Path, order: str, mode: int, chain: tuple[int, ...], regions: list[tuple[int, str]]
) -> None:
    file = PerfFile(order=order)
    file.sample(misc=mode, ip=K1, chain=chain)
    (sample,) = read(tmp_path, file.file())
    assert list(sample.frames()) == regions


def test_a_sample_without_a_callchain(tmp_path: Path) -> None:
    file = PerfFile(PerfEvent(sample_type=pf.IP, period=99))
    file.sample(ip=K1, tail=b"")
    (sample,) = read(tmp_path, file.file())
    assert sample.frames() == ((K1, KERNEL),)
    assert (sample.pid, sample.tid, sample.cpu, sample.time) == (-1, -1, -1, None)
    assert (sample.comm, sample.period) == (":-1", 99)


@pytest.mark.parametrize(
    "sample_type, branches",
    [(pf.STACK_USER, 0), (pf.BRANCH_STACK, 1 << 11), (pf.BRANCH_STACK, 1)],
)
def test_user_frames_that_only_perf_can_make(
    tmp_path: Path, sample_type: int, branches: int
) -> None:
    file = PerfFile(PerfEvent(sample_type=pf.USUAL | sample_type, branches=branches))
    file.sample(chain=CHAIN[:3], tail=b"\0" * 8)
    (sample,) = read(tmp_path, file.file())
    assert sample.frames() == ((K1, KERNEL), (K2, KERNEL))


# Any layout: what was written is what is read

WORDS = st.integers(0, 2**64 - 1)


class Written(NamedTuple):
    ip: int
    pid: int
    tid: int
    time: int
    cpu: int
    period: int
    chain: tuple[int, ...]
    tail: int


SAMPLES = st.builds(
    Written,
    WORDS,
    st.integers(0, 1 << 22),
    st.integers(0, 1 << 22),
    st.integers(1, 2**63),
    st.integers(0, 4095),
    WORDS,
    st.lists(st.integers(1 << 63, 2**64 - 5000), max_size=9).map(tuple),
    st.integers(0, 5),
)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**17 - 1).map(lambda bits: bits & ~pf.READ),
    st.lists(SAMPLES, min_size=1, max_size=5),
    st.sampled_from(FORMS),
)
def test_any_sample_type(
    tmp_path_factory: pytest.TempPathFactory,
    sample_type: int,
    written: list[Written],
    form: tuple[str, str],
) -> None:
    file = PerfFile(PerfEvent(sample_type=sample_type), order=form[0])
    for one in written:
        fields = {**one._asdict(), "tail": b"\xee" * 8 * one.tail}
        file.sample(**fields)  # type: ignore[arg-type]
    found = read(tmp_path_factory.getbasetemp(), getattr(file, form[1])())
    if sample_type & pf.TIME:
        written = sorted(written, key=lambda one: one.time)
    assert len(found) == len(written)
    for one, sample in zip(written, found):
        assert (sample.pid, sample.tid) == (
            (one.pid, one.tid) if sample_type & pf.TID else (-1, -1)
        )
        assert sample.time == (one.time if sample_type & pf.TIME else None)
        assert sample.cpu == (one.cpu if sample_type & pf.CPU else -1)
        assert sample.period == (one.period if sample_type & pf.PERIOD else 4000)
        chain = one.chain if sample_type & pf.CALLCHAIN else ()
        ip = one.ip if sample_type & pf.IP else 0
        marker = ip >= 2**64 - 4095
        expected = chain or (() if marker else (ip,))
        assert tuple(address for address, _ in sample.frames()) == expected


@pytest.mark.parametrize("read_format", range(32))
@pytest.mark.parametrize("order", "<>")
def test_counters_read_with_a_sample(tmp_path: Path, order: str, read_format: int) -> None:
    """perf makes a sample of each counter that has gone on; without ids it knows of none."""
    sample_type = pf.USUAL | pf.READ | pf.IDENTIFIER
    first = PerfEvent("a", sample_type, (7,), read_format)
    file = PerfFile(first, PerfEvent("b", sample_type, (8,), read_format), order=order)
    for time, counts in enumerate([((100, 7), (5, 8)), ((103, 7), (5, 8)), ((103, 7), (9, 8))], 1):
        taken = counts if read_format & 8 else counts[:1]
        file.sample(event_id=7, time=time, chain=CHAIN, counts=taken)
    samples, found = read_all(tmp_path, file.file())
    if not read_format & 4:
        assert (samples, found.unknown) == ([], 6 if read_format & 8 else 3)
        return
    expected = [("a", 100), ("b", 5), ("a", 3), ("b", 4)]
    if not read_format & 8:
        expected = [("a", 100), ("a", 3)]
    assert [(sample.event.name, sample.period) for sample in samples] == expected
    assert {sample.frames() for sample in samples} == {((K1, KERNEL), (K2, KERNEL), (U1, USER))}


@pytest.mark.parametrize("order, form", FORMS)
@pytest.mark.parametrize("bit", [pf.ID, pf.IDENTIFIER])
def test_several_events_are_told_apart_by_ids(
    tmp_path: Path, order: str, form: str, bit: int
) -> None:
    events = [PerfEvent("a", pf.USUAL | bit, (7, 9)), PerfEvent("b", pf.USUAL | bit, (8,))]
    file = PerfFile(*events, order=order)
    for time, number in enumerate([8, 7, 9, 99, 0, 8], 1):
        file.sample(event_id=number, time=time, ip=K1)
    samples, found = read_all(tmp_path, getattr(file, form)())
    assert [(sample.time, sample.event.name) for sample in samples] == [
        (1, "b"),
        (2, "a"),
        (3, "a"),
        (5, "a"),
        (6, "b"),
    ]
    assert found.unknown == 1


def test_events_of_a_pipe_that_are_named_later(tmp_path: Path) -> None:
    file = PerfFile(PerfEvent("", pf.USUAL | pf.ID, (7,)))
    file.add(pf.EVENT_UPDATE, file.pack("QQ", 2, 7) + b"mine\0\0\0\0")
    file.sample(event_id=7)
    (sample,) = read(tmp_path, file.pipe())
    assert sample.event.name == "mine"


def test_events_that_only_perf_names(tmp_path: Path) -> None:
    """perf names them by their attr: ``cycles:ppH``."""
    file = PerfFile(PerfEvent())
    file.sample()
    content = file.pipe()
    at = content.index(file.pack("Q", pf.EVENT_DESC))
    assert "name its events" in refusal(tmp_path, content[: at - 8] + file.records[0])


def test_events_of_one_name(tmp_path: Path) -> None:
    events = [PerfEvent(name, pf.USUAL | pf.ID, (at,)) for at, name in enumerate("aab", 7)]
    file = PerfFile(*events)
    for time, at in enumerate((9, 8, 7), 1):
        file.sample(event_id=at, time=time)
    assert [sample.event.name for sample in read(tmp_path, file.file())] == ["b", "a", "a"]


# Order


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=8))
def test_rounds_bound_the_order(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[list[int]]
) -> None:
    """A round's end delivers what is not newer than the newest of the rounds before it."""
    file = PerfFile()
    file.comm(1, 2, b"task")
    expected: list[tuple[int, int]] = []
    waiting: list[tuple[int, int]] = []
    number = newest = limit = 0
    for times in rounds:
        for time in times:
            number += 1
            file.sample(time=time, period=number)
            # Without a time it is delivered at once.
            (waiting if time else expected).append((time, number))
            newest = max(newest, time)
        waiting.sort()
        expected += [one for one in waiting if one[0] <= limit]
        waiting = [one for one in waiting if one[0] > limit]
        limit = newest
        file.add(pf.FINISHED_ROUND)
    samples = read(tmp_path_factory.getbasetemp(), file.file())
    assert [(sample.time, sample.period) for sample in samples] == expected + sorted(waiting)


def test_a_round_without_end_is_delivered_by_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_samples, "_CHUNK", 1000)
    monkeypatch.setattr(data_samples, "_MOST_HELD", 40)
    file = PerfFile()
    for time in range(1, 501):
        file.sample(time=time)
    assert [sample.time for sample in read(tmp_path, file.file())] == list(range(1, 501))


@pytest.mark.parametrize("size", [64, 100, 1000, 1 << 20])
def test_records_across_what_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(data_samples, "_CHUNK", size)
    file = PerfFile()
    for time in range(1, 200):
        file.sample(time=time, chain=CHAIN * (time % 7))
        if time % 50 == 0:
            file.add(pf.FINISHED_ROUND)
        if time == 60:
            file.records.append(file.record(pf.TRACING_DATA, file.pack("I", 1500)) + b"\xff" * 1504)
    for content in (file.file(), file.pipe()):
        assert [sample.time for sample in read(tmp_path, content)] == list(range(1, 200))


# Tasks


@pytest.mark.parametrize("order, form", FORMS)
def test_names_of_tasks(tmp_path: Path, order: str, form: str) -> None:
    file = PerfFile(order=order)
    file.comm(10, 10, b"shell")
    for time in (1, 21, 31, 41, 51):
        file.sample(pid=10, tid=10, time=time)
        file.sample(pid=10, tid=12, time=time)
    file.sample(pid=0, tid=0, time=60)
    file.comm(10, 10, "cäfé".encode() + b"\xff", time=50)
    file.comm(12, 12, b"ls", time=30)
    file.fork(12, 10, 12, 10, time=20)
    file.fork(12, 77, 12, 77, time=40)
    found = [(sample.tid, sample.comm) for sample in read(tmp_path, getattr(file, form)())]
    renamed = "cäfé\udcff"
    assert found[0::2][:5] == [(10, "shell")] * 4 + [(10, renamed)]
    assert found[1::2][:5] == [(12, name) for name in (":12", "shell", "ls", ":12", ":12")]
    assert found[-1] == (0, "swapper")


def test_without_times_of_records_names_hold_from_where_they_stand(tmp_path: Path) -> None:
    file = PerfFile(PerfEvent(sample_type=pf.USUAL & ~pf.TIME))
    file.comm(1, 2, b"one")
    file.sample()
    file.comm(1, 2, b"two")
    file.sample()
    assert [sample.comm for sample in read(tmp_path, file.file())] == ["one", "two"]


def test_the_event_tells_where_a_record_s_time_stands(tmp_path: Path) -> None:
    short = PerfEvent("a", pf.IP | pf.TID | pf.TIME | pf.IDENTIFIER, (7,))
    long = PerfEvent("b", pf.USUAL | pf.STREAM_ID | pf.IDENTIFIER, (8,))
    file = PerfFile(short, long)
    file.comm(1, 2, b"late", time=15, event_id=8)
    file.comm(1, 2, b"early", time=5, event_id=7)
    file.sample(short, event_id=7, time=10)
    file.sample(long, event_id=8, time=20)
    assert [sample.comm for sample in read(tmp_path, file.file())] == ["early", "late"]


def test_what_was_lost_is_counted_and_what_is_new_passed_over(tmp_path: Path) -> None:
    file = PerfFile()
    file.add(pf.LOST, file.pack("QQ", 1, 5))
    file.add(pf.LOST_SAMPLES, file.pack("Q", 7))
    for kind in (5, 8, 11, 14, 17, 18, 21, 40, 65, 69, 82, 99, 1 << 31):
        file.add(kind, b"\xff" * 40)
    file.sample()
    samples, found = read_all(tmp_path, file.file())
    assert (len(samples), found.lost) == (1, 12)


# What is not read


@pytest.mark.parametrize(
    "arch", ["i686", "armv7l", "s390x", "sparc64", "ppc", "parisc64", "mips", "riscv32", "new"]
)
@pytest.mark.parametrize("form", ["file", "pipe"])
def test_machines_with_other_kernel_addresses(tmp_path: Path, arch: str, form: str) -> None:
    file = PerfFile(arch=arch)
    file.sample()
    assert f"({arch})" in refusal(tmp_path, getattr(file, form)())


def test_a_nameless_machine_is_known_by_its_kernel_s_map(tmp_path: Path) -> None:
    file = PerfFile(arch=None)
    file.kernel_map(0xC000_8000)
    file.sample()
    assert "0xc0008000" in refusal(tmp_path, file.pipe())
    file = PerfFile(arch=None)
    file.kernel_map(K1)
    file.sample(ip=K2)
    assert read(tmp_path, file.pipe())[0].frames() == ((K2, KERNEL),)


@pytest.mark.parametrize(
    "feature, kind, words",
    [(18, 70, "traces"), (None, 71, "traces"), (27, 81, "compressed"), (None, 83, "compressed")],
)
def test_what_only_perf_makes_samples_of(
    tmp_path: Path, feature: int | None, kind: int, words: str
) -> None:
    file = PerfFile()
    file.add(kind, b"\0" * 40)
    file.sample()
    assert words in refusal(tmp_path, file.file())
    assert words in refusal(tmp_path, file.pipe())
    if feature is not None:
        file.records.clear()
        file.features[feature] = b"\0" * 8
        assert words in refusal(tmp_path, file.file())
        assert words in refusal(tmp_path, file.pipe())


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="folder"):
        DataSamples(str(tmp_path))


@pytest.mark.parametrize("path", ["/nonexistent/perf.data", "a\0b", ""])
def test_no_file(path: str) -> None:
    with pytest.raises(DataError, match="cannot be opened"):
        DataSamples(path)


def test_several_events_without_ids(tmp_path: Path) -> None:
    file = PerfFile(PerfEvent("a"), PerfEvent("b"))
    file.sample()
    assert "which event" in refusal(tmp_path, file.file())


@pytest.mark.parametrize("content", [b"", b"PERFILE2", b"PERFFILE" + b"\0" * 200, b"\x7fELF" * 50])
def test_other_files(tmp_path: Path, content: bytes) -> None:
    assert refusal(tmp_path, content)


def test_samples_before_any_event(tmp_path: Path) -> None:
    file = PerfFile()
    file.sample()
    assert "before" in refusal(tmp_path, file.pipe()[:16] + file.records[0])


def damage(file: PerfFile) -> dict[str, bytes]:
    whole = file.file()
    sample = file.records[-1]
    at = whole.index(sample)
    return {
        "cut": whole[: at + 10],
        "unfinished": whole[:48] + b"\0" * 8 + whole[56:],
        "cut in a record": file.pipe()[:-1],
        "no size": whole.replace(sample, sample[:6] + b"\0\0" + sample[8:]),
        "a small sample": whole.replace(sample, sample[:6] + b"\x10\0" + sample[8:]),
        "a long callchain": whole.replace(
            sample, sample.replace(struct.pack("<Q", len(CHAIN)), struct.pack("<Q", 1 << 61))
        ),
        "attrs beyond": whole[:24] + struct.pack("<QQ", 1 << 62, 1 << 20) + whole[40:],
    }


@pytest.mark.parametrize(
    "kind",
    [
        "cut",
        "unfinished",
        "cut in a record",
        "no size",
        "a small sample",
        "a long callchain",
        "attrs beyond",
    ],
)
def test_damage_is_told(tmp_path: Path, kind: str) -> None:
    file = PerfFile()
    file.sample(chain=CHAIN)
    assert re.search("damaged|not complete", refusal(tmp_path, damage(file)[kind]))


def whole_file(form: str) -> bytes:
    file = PerfFile(
        PerfEvent("a", pf.USUAL | pf.READ | pf.IDENTIFIER, (7,), 31),
        PerfEvent("b", pf.USUAL | pf.IDENTIFIER, (8,)),
    )
    file.kernel_map(K1)
    file.comm(1, 2, b"one")
    file.records.append(file.record(pf.TRACING_DATA, file.pack("I", 12)) + b"\1" * 16)
    for time in range(1, 12):
        file.sample(file.events[0], event_id=7, time=time, chain=CHAIN, counts=((time, 7), (1, 8)))
        file.sample(file.events[1], event_id=8, time=time, chain=CHAIN)
        file.fork(1, 1, time, 2, time)
        file.add(pf.FINISHED_ROUND)
    file.add(pf.LOST, file.pack("QQ", 1, 5))
    return getattr(file, form)()


WHOLE = {form: whole_file(form) for form in ("file", "pipe")}


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["file", "pipe"]),
    st.lists(
        st.tuples(
            st.integers(0, min(map(len, WHOLE.values())) - 8),
            st.sampled_from([0, 1, 7, 0xFFFF, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, 2**64 - 1])
            | st.integers(0, 2**64 - 1),
            st.sampled_from(["=B", "=H", "=I", "=Q"]),
        ),
        max_size=4,
    ),
    st.integers(0, 4000),
)
def test_whatever_a_file_holds_nothing_else_is_raised(
    tmp_path_factory: pytest.TempPathFactory,
    form: str,
    changes: list[tuple[int, int, str]],
    cut: int,
) -> None:
    content = bytearray(WHOLE[form])
    for at, value, size in changes:
        struct.pack_into(size, content, at, value % (1 << 8 * struct.calcsize(size)))
    samples: list[Sample] = []
    with contextlib.suppress(DataError):
        samples = read(tmp_path_factory.getbasetemp(), bytes(content[: cut or None]))
    for sample in samples:
        assert all(0 <= address < 1 << 64 for address, _ in sample.frames())
        assert sample.comm
        assert sample.event.name is not None


_IN_LITTLE_MEMORY = """
import resource, sys
from ksym_plugin.perf.data import DataError
from ksym_plugin.perf.data_samples import DataSamples
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
count = 0
try:
    with DataSamples(sys.argv[1]) as found:
        for sample in found.samples():
            count += 1
except DataError as error:
    print(error)
print(count)
"""


def in_little_memory(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _IN_LITTLE_MEMORY, str(path)],
        cwd=Path(data.__file__).parents[2],
        capture_output=True,
        timeout=60,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("what", ["ids", "attrs", "data", "tracing"])
def test_huge_sizes_cost_nothing(tmp_path: Path, what: str) -> None:
    """With gigabytes of file behind them, so that the sizes are not even wrong."""
    file = PerfFile(PerfEvent(ids=(7,)))
    file.sample()
    content = bytearray(file.file())
    if what == "ids":
        struct.pack_into("<Q", content, pf.HEAD_SIZE + 8 + pf.ATTR_SIZE + 8, 3 << 30)
    elif what == "attrs":
        struct.pack_into("<Q", content, 32, 3 << 30)
    elif what == "data":
        struct.pack_into("<Q", content, 48, 3 << 30)
    else:
        content = bytearray(file.pipe() + file.record(pf.TRACING_DATA, file.pack("I", 3 << 30)))
    path = tmp_path / "perf.data"
    path.write_bytes(content)
    with path.open("r+b") as opened:
        opened.truncate(4 << 30)
    assert re.search("damaged|does not name its events", in_little_memory(path))


def test_memory_stays_small_where_no_round_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_samples, "_CHUNK", 1 << 14)
    monkeypatch.setattr(data_samples, "_MOST_HELD", 1 << 12)
    file = PerfFile(PerfEvent(sample_type=pf.TIME))
    file.sample(time=1)
    path = tmp_path / "perf.data"
    path.write_bytes(file.pipe() + file.records[0] * 100_000)
    tracemalloc.start()
    try:
        with DataSamples(str(path)) as found:
            assert sum(1 for _ in found.samples()) == 100_001
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# What perf makes of the same files

_LINE = re.compile(
    r"\s*(.*?)\s+(-?\d+)/(-?\d+)\s+\[(\d+)\]\s+(\d+)\.(\d{9}):\s+(\d+)\s+(\S+):\s*([0-9a-f]*)"
)


def by_perf(path: Path) -> list[tuple[object, ...]]:
    if shutil.which("perf") is None:
        pytest.skip("perf is not installed")
    fields = "comm,pid,tid,cpu,time,period,event,ip"
    line = ["perf", "script", "-f", "-i", str(path), "--ns", "-F", fields]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60)
    found: list[tuple[list[object], list[int]]] = []
    for line_ in done.stdout.splitlines():
        if line_.startswith("\t"):
            found[-1][1].append(int(line_.split()[0], 16))
        elif line_.strip():
            matched = _LINE.fullmatch(line_.rstrip())
            assert matched is not None, line_
            comm, pid, tid, cpu, seconds, rest, period, event, ip = matched.groups()
            # Of the other byte order it does not read the names, and adds what it thinks.
            event = event.partition(":")[0]
            time = int(seconds) * 10**9 + int(rest)
            head = [comm, int(pid), int(tid), int(cpu), time, int(period), event]
            found.append((head, [int(ip, 16)] if ip else []))
    return [(*head, tuple(frames)) for head, frames in found]


def rows(samples: list[Sample]) -> list[tuple[object, ...]]:
    return [
        (
            sample.comm,
            sample.pid,
            sample.tid,
            sample.cpu,
            sample.time,
            sample.period,
            sample.event.name,
            tuple(address for address, _ in sample.frames()),
        )
        for sample in samples
    ]


# perf 6.1 does not put a task's id and the CPU right in a pipe's data of the other byte order.
@pytest.mark.parametrize("order, form", FORMS[:3])
def test_perf_reads_the_same(tmp_path: Path, order: str, form: str) -> None:
    usual = pf.USUAL | pf.IDENTIFIER
    events = (
        PerfEvent("cpu-clock", usual | pf.READ, (7,), 4 | 8),
        PerfEvent("page-faults", usual | pf.READ, (8,), 4 | 8, config=2),
    )
    file = PerfFile(*events, order=order)
    file.comm(10, 10, b"a shell")
    file.comm(30, 30, b"renamed", time=55)
    file.fork(30, 10, 30, 10, time=25)
    for turn, times in enumerate([[30, 10, 20], [25, 40, 35], [60, 50], [45, 70]]):
        for time in times:
            for tid in (10, 30):
                file.sample(
                    event_id=7,
                    pid=tid,
                    tid=tid,
                    time=10**9 + time,
                    cpu=turn,
                    counts=((time * 10 + tid, 7), (turn, 8)),
                    chain=(IN_KERNEL, K1, K1 + tid, IN_USER, U1 + time),
                )
        file.add(pf.FINISHED_ROUND)
    path = tmp_path / "perf.data"
    found = read(tmp_path, getattr(file, form)())
    assert rows(found) == by_perf(path)
    assert len(found) > 20

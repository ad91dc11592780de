"""The rings, laid out in plain files as the kernel lays them out in memory."""

from __future__ import annotations

import mmap
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.kernel import perf_ring, syscalls
from ksym_plugin.sources import probe_records
from ksym_plugin.sources.probe_records import BpfRing, PerfBuffers, open_rings

PAGE = mmap.PAGESIZE
SIZE = PAGE
BUSY, DISCARDED = 1 << 31, 1 << 30


class KernelRing:
    """The kernel's side of a BPF ring buffer (kernel/bpf/ringbuf.c), in a file."""

    def __init__(self, path, at=0):
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self.file, 2 * PAGE + 2 * SIZE)
        self.head = at
        self.set(0, at)
        self.set(PAGE, at)

    def set(self, offset, value):
        os.pwrite(self.file, struct.pack("=Q", value), offset)

    def tail(self):
        return struct.unpack("=Q", os.pread(self.file, 8, 0))[0]

    def write(self, data, flags=0):
        """False if it does not fit."""
        whole = (8 + len(data) + 7) & ~7
        if self.head + whole - self.tail() > SIZE:
            return False
        record = struct.pack("=II", len(data) | flags, 0) + data
        for index, byte in enumerate(record):
            place = (self.head + index) % SIZE
            for copy in (0, SIZE):
                os.pwrite(self.file, bytes((byte,)), 2 * PAGE + copy + place)
        self.head += whole
        self.set(PAGE, self.head)
        return True

    def finish(self, at, length):
        for copy in (0, SIZE):
            os.pwrite(self.file, struct.pack("=I", length), 2 * PAGE + copy + at % SIZE)

    def close(self):
        os.close(self.file)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tmp_path_factory.mktemp("ring") / "ring")


@given(
    st.integers(0, 5 * SIZE // 8),
    st.lists(st.lists(st.binary(max_size=700), max_size=6), max_size=5),
)
def test_what_is_written_is_taken_in_order_and_once(path, at, batches):
    kernel = KernelRing(path, 8 * at)
    ring = BpfRing(kernel.file, SIZE)
    try:
        for batch in batches:
            written = [data for data in batch if kernel.write(data)]
            assert ring.take() == written
            assert kernel.tail() == kernel.head
        assert ring.take() == []
    finally:
        ring.close()
        ring.close()
        kernel.close()


def test_a_busy_record_and_what_is_behind_it_waits(path):
    kernel = KernelRing(path)
    ring = BpfRing(kernel.file, SIZE)
    kernel.write(b"first")
    at = kernel.head
    kernel.write(b"second", BUSY)
    kernel.write(b"third")
    assert ring.take() == [b"first"]
    assert ring.take() == []
    kernel.finish(at, 6)
    assert ring.take() == [b"second", b"third"]
    ring.close()
    kernel.close()


def test_a_discarded_record_is_passed_over(path):
    kernel = KernelRing(path)
    ring = BpfRing(kernel.file, SIZE)
    kernel.write(b"first")
    kernel.write(b"thrown away", DISCARDED)
    kernel.write(b"last")
    assert ring.take() == [b"first", b"last"]
    ring.close()
    kernel.close()


@pytest.mark.parametrize(("cpus", "each"), [("0-1", 1 << 19), ("0-2", 1 << 18), ("0-127", 1 << 15)])
def test_perf_buffers_share_the_size(monkeypatch, cpus, each):
    monkeypatch.setattr(probe_records, "online_text", lambda: cpus)
    monkeypatch.setattr(probe_records, "PerfBuffers", lambda map_fd, size, epoll: size)
    assert open_rings(3, False, 1 << 20, Poll()) == each


class Poll:
    """Plain files cannot be polled; this notes what would be."""

    def __init__(self):
        self.fds = []

    def register(self, fd, events):
        self.fds.append(fd)


class Machine:
    """Perf events as plain files, on CPUs that come and go."""

    def __init__(self, monkeypatch, folder):
        self.folder = folder
        self.cpus = "0-1"
        self.fds = {}
        self.entries = {}
        monkeypatch.setattr(perf_ring, "online_text", lambda: self.cpus)
        monkeypatch.setattr(syscalls, "perf_event_open", self.open)
        monkeypatch.setattr(probe_records, "update", self.update)

    def open(self, attr, pid, cpu, group=-1):
        self.fds[cpu] = os.open(self.folder / f"cpu{cpu}", os.O_RDWR | os.O_CREAT)
        os.ftruncate(self.fds[cpu], 2 * PAGE)
        return self.fds[cpu]

    def update(self, map_fd, key, value):
        self.entries[key] = value

    def sample(self, cpu, data, kind=9):
        """Append a record as perf does for bpf_perf_event_output(): padded to 8 bytes."""
        fd = self.fds[cpu]
        padded = data + bytes(-(4 + len(data)) % 8)
        record = struct.pack("=IHHI", kind, 0, 12 + len(padded), len(padded)) + padded
        (head,) = struct.unpack("=Q", os.pread(fd, 8, 1024))
        os.pwrite(fd, record, PAGE + head)
        os.pwrite(fd, struct.pack("=Q", head + len(record)), 1024)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def test_samples_of_all_cpus_are_taken(machine):
    poll = Poll()
    buffers = PerfBuffers(3, PAGE, poll)
    assert machine.entries == machine.fds
    assert poll.fds == list(machine.fds.values())
    machine.sample(0, b"one record")
    machine.sample(0, b"something else", kind=2)
    machine.sample(1, b"another")
    assert [data.rstrip(b"\0") for data in buffers.take()] == [b"one record", b"another"]
    assert buffers.take() == []
    buffers.close()
    buffers.close()


def test_a_cpu_that_goes_leaves_its_records(machine):
    poll = Poll()
    buffers = PerfBuffers(3, PAGE, poll)
    machine.sample(1, b"the last")
    machine.cpus = "0,2"
    buffers.follow_cpus()
    assert poll.fds[2:] == [machine.fds[2]] == [machine.entries[2]]
    buffers.follow_cpus()
    assert len(poll.fds) == 3
    machine.sample(2, b"the first")
    assert [data.rstrip(b"\0") for data in buffers.take()] == [b"the last", b"the first"]
    buffers.close()


def test_an_event_that_cannot_be_opened_closes_the_others(monkeypatch, machine):
    def refuse(map_fd, key, value):
        if key == 1:
            raise OSError(7, "no room")

    monkeypatch.setattr(probe_records, "update", refuse)
    with pytest.raises(OSError, match="no room"):
        PerfBuffers(3, PAGE, Poll())
    for fd in machine.fds.values():
        with pytest.raises(OSError):
            os.fstat(fd)


def test_a_cpu_that_cannot_be_listened_to_yet_is_tried_again(monkeypatch, machine):
    poll = Poll()
    buffers = PerfBuffers(3, PAGE, poll)
    kept, refused = machine.update, []

    def refuse(map_fd, key, value):
        refused.append(value)
        raise OSError(19, "gone again")

    machine.cpus = "0-2"
    monkeypatch.setattr(probe_records, "update", refuse)
    buffers.follow_cpus()
    with pytest.raises(OSError):
        os.fstat(refused[0])
    machine.sample(0, b"goes on")
    assert [data.rstrip(b"\0") for data in buffers.take()] == [b"goes on"]
    monkeypatch.setattr(probe_records, "update", kept)
    buffers.follow_cpus()
    assert machine.entries[2] == machine.fds[2] == poll.fds[-1]
    buffers.follow_cpus()
    assert len(poll.fds) == 4
    buffers.close()

"""Starting a source: what it says when it may not, and what it leaves behind."""

from __future__ import annotations

import errno
import os

import pytest

from ksym_plugin import sources
from ksym_plugin.kernel import perf_ring, snapshot, syscalls
from ksym_plugin.kernel.bpf_prog import ProgramReader
from ksym_plugin.kernel.kallsyms import Tail
from ksym_plugin.sources import perf_event, probe
from ksym_plugin.sources.perf_event import PerfEventSource
from ksym_plugin.timeline.errors import SourceError

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")


def open_fds():
    return sorted(os.listdir("/proc/self/fd"))


def fail(number):
    raise OSError(number, os.strerror(number))


class Kernel:
    """Hands out descriptors of a plain file in place of events, until told to fail."""

    def __init__(self, path, fail_at, number):
        self.path = path
        self.fail_at = fail_at
        self.number = number
        self.opened = 0

    def open(self, attr, pid, cpu, group=-1):
        self.opened += 1
        if self.opened == self.fail_at:
            fail(self.number)
        return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)


@pytest.fixture
def four_cpus(monkeypatch, tmp_path):
    """The kernel's list of CPUs, for a test to change."""
    path = tmp_path / "online"
    path.write_text("0-3\n")
    monkeypatch.setattr(perf_ring, "ONLINE", str(path))
    return path


@pytest.fixture
def ring_file(tmp_path):
    path = tmp_path / "ring"
    path.write_bytes(bytes(perf_event.RING_BYTES + 65536))
    return str(path)


class FakeEpoll:
    """Plain files cannot be polled; this holds a descriptor all the same."""

    def __init__(self):
        self.fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def register(self, fd, events):
        os.fstat(fd)

    def fileno(self):
        return self.fd

    def close(self):
        os.close(self.fd)


@pytest.fixture
def fake_epoll(monkeypatch):
    monkeypatch.setattr(perf_event.select, "epoll", FakeEpoll)


@pytest.mark.parametrize("fail_at", [1, 3, 4])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
def test_an_event_that_cannot_be_opened_leaves_nothing_open(
    monkeypatch, four_cpus, ring_file, fake_epoll, fail_at, number
):
    monkeypatch.setattr(syscalls, "perf_event_open", Kernel(ring_file, fail_at, number).open)
    before = open_fds()
    with pytest.raises(SourceError):
        PerfEventSource()
    assert open_fds() == before


def test_a_ring_that_cannot_be_mapped_leaves_nothing_open(
    monkeypatch, four_cpus, ring_file, fake_epoll
):
    maps = []

    def refuse_the_third(fd, size):
        maps.append(size)
        return real_map(fd, size) if len(maps) < 3 else fail(errno.EPERM)

    real_map = perf_ring.mmap.mmap
    monkeypatch.setattr(syscalls, "perf_event_open", Kernel(ring_file, 0, 0).open)
    monkeypatch.setattr(perf_ring.mmap, "mmap", refuse_the_third)
    before = open_fds()
    with pytest.raises(SourceError, match="perf_event_mlock_kb"):
        PerfEventSource()
    assert open_fds() == before
    # It had been tried with less and less, down to a page.
    assert maps[2:] == sorted(maps[2:], reverse=True)
    assert maps[-1] == 2 * perf_ring.mmap.PAGESIZE


def test_closing_gives_everything_back_and_may_be_repeated(
    monkeypatch, four_cpus, ring_file, fake_epoll
):
    monkeypatch.setattr(syscalls, "perf_event_open", Kernel(ring_file, 0, 0).open)
    before = open_fds()
    source = PerfEventSource()
    assert len(open_fds()) > len(before)
    assert source.read() == []
    source.close()
    source.close()
    assert open_fds() == before


def test_a_cpu_that_is_offline_is_left_out(monkeypatch, four_cpus, ring_file, fake_epoll):
    kernel = Kernel(ring_file, 2, errno.ENODEV)
    monkeypatch.setattr(syscalls, "perf_event_open", kernel.open)
    source = PerfEventSource()
    source.close()
    assert kernel.opened == 4


def test_a_kernel_without_lost_counts_is_asked_without(
    monkeypatch, four_cpus, ring_file, fake_epoll
):
    asked = []

    def open_event(attr, pid, cpu, group=-1):
        lost = int.from_bytes(attr[32:40], "little")
        asked.append(lost)
        if lost:
            fail(errno.EINVAL)
        return os.open(ring_file, os.O_RDWR | os.O_CLOEXEC)

    monkeypatch.setattr(syscalls, "perf_event_open", open_event)
    PerfEventSource().close()
    assert asked == [syscalls.FORMAT_LOST, 0, 0, 0, 0]


def test_cpus_that_come_and_go_are_followed(monkeypatch, four_cpus, ring_file, fake_epoll):
    monkeypatch.setattr(syscalls, "perf_event_open", Kernel(ring_file, 0, 0).open)
    monkeypatch.setattr(perf_event, "TICK", 0.0)
    monkeypatch.setattr(perf_event, "Ticker", QuietTicker)
    before = open_fds()
    source = PerfEventSource()
    four = len(open_fds())
    four_cpus.write_text("0,3\n")
    assert source.read() == []
    assert len(open_fds()) == four - 2 * 2
    four_cpus.write_text("0-3\n")
    losses = source.read()
    assert [(loss.cause, loss.count) for loss in losses] == [("CPU came online", None)] * 2
    assert all(loss.since < loss.until for loss in losses)
    assert len(open_fds()) == four
    source.close()
    assert open_fds() == before


def test_a_ring_that_cannot_be_read_any_more_leaves_no_other_open(
    monkeypatch, four_cpus, ring_file, fake_epoll
):
    monkeypatch.setattr(syscalls, "perf_event_open", Kernel(ring_file, 0, 0).open)
    monkeypatch.setattr(perf_event, "TICK", 0.0)
    monkeypatch.setattr(perf_event, "Ticker", QuietTicker)
    before = open_fds()
    source = PerfEventSource()
    monkeypatch.setattr(perf_ring.Ring, "waiting", lambda ring, head: fail(errno.EIO))
    four_cpus.write_text("0\n")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        source.read()
    source.close()
    assert open_fds() == before


class QuietTicker:
    def __init__(self, seconds):
        self.fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def clear(self):
        pass

    def close(self):
        os.close(self.fd)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, ["CAP_PERFMON", "perf_event_paranoid"]),
        (errno.EPERM, ["CAP_PERFMON"]),
        (errno.EINVAL, ["ksymbol", "5.1"]),
        (errno.EMFILE, ["ulimit"]),
        (errno.ENOSYS, ["CONFIG_PERF_EVENTS"]),
    ],
)
def test_a_refused_event_says_how_to_get_it(monkeypatch, four_cpus, number, words):
    monkeypatch.setattr(syscalls, "perf_event_open", lambda *a: fail(number))
    with pytest.raises(SourceError) as caught:
        sources.open_source("perf_event")
    for word in words:
        assert word in str(caught.value)


def refuse_bpf(command, attr):
    fail(errno.EPERM)


def test_auto_goes_on_to_the_next_and_keeps_the_reason(monkeypatch, four_cpus):
    monkeypatch.setattr(syscalls, "perf_event_open", lambda *a: fail(errno.EACCES))
    monkeypatch.setattr(syscalls, "bpf", lambda command, attr: fail(errno.ENOENT))
    monkeypatch.setattr(probe, "PMU", "/nowhere")
    monkeypatch.setattr(probe, "KERNEL_BTF", "/nowhere")
    source, refusals = sources.open_source()
    assert source.name == "polling"
    assert (source.fileno(), source.interval) == (-1, 0.1)
    assert [name for name, _ in refusals] == ["kprobe", "fentry", "perf_event"]
    assert "perf_event_paranoid" in refusals[-1][1].remedy
    source.close()


def test_when_none_starts_all_are_named_with_their_reasons(monkeypatch, four_cpus):
    monkeypatch.setattr(syscalls, "perf_event_open", lambda *a: fail(errno.EACCES))
    monkeypatch.setattr(syscalls, "bpf", refuse_bpf)
    monkeypatch.setattr(snapshot, "read_tail", lambda path: Tail([]))
    before = open_fds()
    with pytest.raises(SourceError) as caught:
        sources.open_source()
    text = str(caught.value)
    for word in ("perf_event:", "polling:", "perf_event_paranoid", "CAP_SYS_ADMIN"):
        assert word in text
    assert "\n" not in text
    assert open_fds() == before


def test_a_source_nobody_knows_is_named_with_those_there_are():
    with pytest.raises(SourceError, match="perf_event"):
        sources.open_source("ebpf")


def test_a_program_is_closed_also_when_asking_about_it_fails(monkeypatch):
    def bpf(command, attr):
        if command == syscalls.PROG_GET_FD_BY_ID:
            return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        return fail(errno.ENOMEM)

    monkeypatch.setattr(syscalls, "bpf", bpf)
    before = open_fds()
    with pytest.raises(SourceError):
        ProgramReader().program(3)
    assert open_fds() == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", [0]), ("0-3,6", [0, 1, 2, 3, 6]), ("", []), ("2,4-5", [2, 4, 5])],
)
def test_cpu_lists(text, expected):
    assert perf_ring.parse_cpu_list(text) == expected

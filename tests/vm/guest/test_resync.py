"""What a resync of the kprobe source must end, and what it must not begin."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ksym_plugin.history.recorder import Recorder
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel.clocks import PerfClock
from ksym_plugin.sources.probe import KprobeSource
from tests.oracle import rawbpf
from tests.vm.guest import burst, images

pytestmark = pytest.mark.usefixtures("compiled_once")

UNPRIVILEGED = Path("/proc/sys/kernel/unprivileged_bpf_disabled")
NOBODY = 65534
#: So many take more than the ring has, together with their unloads.
MANY = 400


@pytest.fixture
def recorder(tmp_path):
    """Started, on a ring of 8 pages; nothing is read unless a test has it read."""
    source = KprobeSource(ring_bytes=8 * 4096)
    clock = PerfClock()
    writer = HistoryWriter(str(tmp_path / "x.db"), "kprobe", time.monotonic_ns(), None)
    started = Recorder(source, writer, clock)
    try:
        started.start()
        yield started
        started.finish()
    finally:
        source.close()
        clock.close()


def overflow():
    burst.unload(burst.load(MANY)[0])


def step_until(recorder, resyncs):
    deadline = time.monotonic() + 30
    while recorder.tracker.resyncs < resyncs:
        assert time.monotonic() < deadline
        recorder.step()


def names(recorder):
    return {life.symbol.start: life.symbol.name for life in recorder.timeline.live()}


def test_the_last_image_is_gone_though_its_end_was_lost(recorder):
    others = set(rawbpf.kallsyms_bpf().values())
    tracer = images.tracer()
    try:
        recorder.step()
        came = set(names(recorder).values()) - others
        held = {name for name in came if "trampoline" in name}
        overflow()
    finally:
        rawbpf.close(*tracer)
    # Images are freed a grace period late.
    deadline = time.monotonic() + 20
    while held & set(rawbpf.kallsyms_bpf().values()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    step_until(recorder, 2)
    assert held
    assert names(recorder) == rawbpf.kallsyms_bpf()


def load_as_nobody():
    """A process that holds two programs as a user without privileges, until it is read from."""
    told, tell = os.pipe()
    held, hold = os.pipe()
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        fds, _ = burst.load(2)
        os.write(tell, b"%d" % len(fds))
        os.read(held, 1)
        os._exit(0)
    assert os.read(told, 1) == b"2"
    for fd in (told, tell, held):
        os.close(fd)
    return child, hold


def test_programs_whose_end_would_not_be_told_are_not_taken_up(recorder):
    before = UNPRIVILEGED.read_text()
    UNPRIVILEGED.write_text("0")
    try:
        child, hold = load_as_nobody()
    finally:
        UNPRIVILEGED.write_text(before)
    overflow()
    recorder.step()
    step_until(recorder, 2)
    assert names(recorder) == rawbpf.kallsyms_bpf()
    os.write(hold, b"x")
    os.close(hold)
    os.waitpid(child, 0)
    recorder.step()
    assert names(recorder) == rawbpf.kallsyms_bpf()

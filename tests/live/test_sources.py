"""The sources on this kernel, against raw bpf(2), kallsyms and perf itself.

A child loads and unloads as it is told, and says what bpf(2) and the kernel's own list
know of each program. At most 60 functions are held at a time.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time

import pytest

from ksym_plugin.sources import open_source, perf_event
from ksym_plugin.timeline.symbols import Load, Loss, Unload
from tests.oracle import procs

#: How long anything may take, on a machine that others keep busy.
SECONDS = 120.0

#: Reads "load N SEED" and "unload"; answers with one line of JSON.
_CHILD = """
import json, os, sys, time
from tests.oracle import programs, rawbpf
held = []
print("{}", flush=True)
for line in sys.stdin:
    words = line.split()
    began = time.monotonic_ns()
    if words[0] == "load":
        fresh = []
        for at in range(int(words[1])):
            seed = int(words[2]) + at
            if at % 3:
                fresh.append(programs.plain(f"plain{seed}", seed, work=8))
            else:
                names = [f"main_with_a_long_name_{seed}", f"one_{seed}", f"two_{seed}"]
                fresh.append(programs.with_subprograms(names[0], names, seed, work=8))
        done = time.monotonic_ns()
        names = rawbpf.kallsyms_bpf()
        told = [rawbpf.info(fd) for fd in fresh]
        symbols = [
            [start, start + length, names[start], info.id]
            for info in told for start, length in zip(info.starts, info.lens)
        ]
        held += fresh
    elif words[0] == "run":
        rawbpf.test_run(held[0], int(words[1]))
        done, symbols = time.monotonic_ns(), []
    else:
        for fd in held:
            os.close(fd)
        held.clear()
        done, symbols = time.monotonic_ns(), []
    print(json.dumps({"began": began, "done": done, "symbols": symbols}), flush=True)
"""


class Child:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=procs.environment(),
            cwd=procs.REPO,
        )
        procs.read_line(self.process.stdout.fileno(), SECONDS)

    def tell(self, words):
        self.process.stdin.write(words.encode() + b"\n")
        self.process.stdin.flush()
        told = json.loads(procs.read_line(self.process.stdout.fileno(), SECONDS))
        told["symbols"] = {tuple(symbol) for symbol in told["symbols"]}
        return told

    def close(self):
        self.process.stdin.close()
        procs.end_group(self.process)


@pytest.fixture
def child():
    one = Child()
    yield one
    one.close()


@pytest.fixture(params=["perf_event", "polling"])
def source(request):
    opened, _ = open_source(request.param)
    yield opened
    opened.close()


@pytest.fixture
def perf_source():
    opened, _ = open_source("perf_event")
    yield opened
    opened.close()


def gather(source, enough):
    """Read until ``enough(changes)``; every wait is for the source or for its interval."""
    changes = []
    deadline = time.monotonic() + SECONDS
    while not enough(changes):
        assert time.monotonic() < deadline, f"only {len(changes)} changes: {changes[-3:]}"
        if source.fileno() >= 0:
            select.select([source], [], [], 0.5)
        else:
            time.sleep(source.interval)
        changes += source.read()
    return changes


def loads_of(changes, symbols):
    """The loads of these symbols, the last report of each."""
    ids = {prog_id for _, _, _, prog_id in symbols}
    return {
        (load.symbol.start, load.symbol.end, load.symbol.name, load.prog_id): load
        for load in changes
        if isinstance(load, Load) and load.prog_id in ids
    }


def unloads_of(changes, symbols):
    ids = {prog_id for _, _, _, prog_id in symbols}
    return {
        (unload.start, unload.name, unload.prog_id): unload
        for unload in changes
        if isinstance(unload, Unload) and unload.prog_id in ids
    }


def check_loads_and_unloads(source, child, seed):
    loaded = child.tell(f"load 12 {seed}")
    symbols = loaded["symbols"]
    assert len(symbols) == 12 + 4 * 2
    changes = gather(source, lambda got: len(loads_of(got, symbols)) >= len(symbols))
    loads = loads_of(changes, symbols)
    assert set(loads) == symbols
    for load in loads.values():
        assert load.earliest <= loaded["done"] and load.latest >= loaded["began"]
        assert load.earliest <= load.latest
    gone = child.tell("unload")
    changes = gather(source, lambda got: len(unloads_of(got, symbols)) >= len(symbols))
    unloads = unloads_of(changes, symbols)
    assert set(unloads) == {(start, name, prog_id) for start, _, name, prog_id in symbols}
    for unload in unloads.values():
        # An unload may be carried out a little after the close returned.
        assert unload.latest >= gone["began"] and unload.earliest <= unload.latest


def test_loads_and_unloads_are_seen_as_bpf_and_kallsyms_have_them(source, child):
    source.snapshot()
    check_loads_and_unloads(source, child, 1000)


def test_a_snapshot_holds_what_was_loaded_before(source, child):
    told = child.tell("load 12 2000")
    loads = loads_of(source.snapshot(), told["symbols"])
    assert set(loads) == told["symbols"]
    for load in loads.values():
        assert load.earliest <= told["done"] <= load.latest
        assert not load.open_ended


def test_programs_known_from_a_snapshot_go_under_their_names(perf_source, child):
    symbols = child.tell("load 6 3000")["symbols"]
    perf_source.read()
    perf_source.snapshot()
    child.tell("unload")
    changes = gather(perf_source, lambda got: len(unloads_of(got, symbols)) >= len(symbols))
    assert set(unloads_of(changes, symbols)) == {
        (start, name, prog_id) for start, _, name, prog_id in symbols
    }


class PerfRecord:
    """``perf record -a``, listening once the constructor returns."""

    def __init__(self, path):
        control, self._control = os.pipe()
        self._ack, ack = os.pipe()
        command = ["perf", "record", "-q", "-a", "-e", "cpu-clock", "-F", "99", "-o", path]
        command += ["-D", "-1", f"--control=fd:{control},{ack}", "--", "sleep", "600"]
        self._process = procs.start(command, fds=[control, ack])
        os.close(control)
        os.close(ack)
        self._command("enable")

    def _command(self, word):
        os.write(self._control, word.encode() + b"\n")
        procs.read_line(self._ack, SECONDS)

    def stop(self):
        self._command("disable")
        os.write(self._control, b"stop\n")
        self._process.wait(SECONDS)
        self.close()

    def close(self):
        for fd in (self._control, self._ack):
            if fd >= 0:
                os.close(fd)
        self._control = self._ack = -1
        procs.end_group(self._process)


def test_records_padded_for_a_younger_listener_are_read(perf, perf_source, child, tmp_path):
    # perf asks for sample ids, and so the kernel pads what it writes for older listeners.
    perf_source.snapshot()
    record = PerfRecord(str(tmp_path / "perf.data"))
    try:
        check_loads_and_unloads(perf_source, child, 4000)
    finally:
        record.close()


def test_an_older_perf_record_is_not_harmed(perf, child, tmp_path):
    path = str(tmp_path / "perf.data")
    record = PerfRecord(path)
    try:
        source, _ = open_source("perf_event")
        symbols = child.tell("load 6 5000")["symbols"]
        gather(source, lambda got: len(loads_of(got, symbols)) >= len(symbols))
        source.close()
        record.stop()
    finally:
        record.close()
    shown = procs.run(["perf", "script", "-i", path, "--show-bpf-events"], 60)
    assert "Can't parse" not in shown.err
    lines = [line for line in shown.out.splitlines() if "PERF_RECORD_KSYMBOL" in line]
    for start, _, name, _ in symbols:
        (line,) = [line for line in lines if f"{start:x}" in line and line.endswith(name)]
        # perf reads the time from the record's end: padding there makes it 0.
        assert " 0.000000: " not in line


def test_a_full_ring_is_told_and_reading_goes_on(monkeypatch, child):
    monkeypatch.setattr(perf_event, "RING_BYTES", 4096)
    source, _ = open_source("perf_event")
    try:
        source.snapshot()
        symbols = child.tell("load 12 6000")["symbols"]
        for seed in range(6100, 6700, 100):
            child.tell("unload")
            symbols |= child.tell(f"load 12 {seed}")["symbols"]
        changes = source.read()
        losses = [change for change in changes if isinstance(change, Loss)]
        assert losses and all(loss.since < loss.until for loss in losses)
        own = {prog_id for *_, prog_id in symbols}
        seen = [change for change in changes if not isinstance(change, Loss)]
        ours = [change for change in seen if change.prog_id in own]
        assert len(own) == 7 * 12
        # Seven times 20 functions came, and six times went.
        assert len(ours) < 13 * 20
        if all(loss.count is not None for loss in losses):
            lost = sum(loss.count for loss in losses)
            assert lost > 0
            if max(own) - min(own) < len(own) and len(ours) == len(seen):
                # Ids are given in order: nobody else has loaded a program meanwhile.
                assert lost <= 13 * (20 + 12) - len(seen)
        check_after = child.tell("unload")
        assert check_after["done"]
        source.read()
        check_loads_and_unloads(source, child, 7000)
    finally:
        source.close()


def test_waiting_costs_nothing(perf_source):
    perf_source.read()
    began, cpu, idle, busy = time.monotonic(), 0.0, 0, 0
    while time.monotonic() - began < 3.0:
        select.select([perf_source], [], [], 3.0)
        before = time.thread_time()
        if perf_source.read():
            busy += 1
            continue
        cpu += time.thread_time() - before
        idle += 1
    # One tick a second; and of what others load and unload on this host, a record that says
    # nothing new may come alone.
    assert idle <= 5 + busy
    assert cpu < 0.06 + busy * 0.002


def test_descriptors_are_closed_again():
    before = sorted(os.listdir("/proc/self/fd"))
    for name in ("perf_event", "polling"):
        source, _ = open_source(name)
        for fd in set(os.listdir("/proc/self/fd")).difference(before):
            try:
                assert not os.get_inheritable(int(fd))
            except OSError:
                continue  # the listing's own
        source.snapshot()
        source.read()
        source.close()
        source.close()
    assert sorted(os.listdir("/proc/self/fd")) == before

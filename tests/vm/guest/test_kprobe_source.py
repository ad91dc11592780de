"""The kprobe and fentry sources, against what the kernel says through bpf(2) and kallsyms."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ksym_plugin.kernel.bpf_prog import ProgramReader
from ksym_plugin.sources import probe
from ksym_plugin.sources.bcc_loader import BccProgram
from ksym_plugin.sources.probe import FentrySource, KprobeSource
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.symbols import (
    BPF_DISPATCHER,
    BPF_PROG,
    BPF_STRUCT_OPS,
    BPF_TRAMPOLINE,
    Load,
    Loss,
    Unload,
)
from tests.oracle import procs, programs, rawbpf
from tests.vm.guest import burst, images, structops

# Tests that are about compiling put ``BccProgram`` back.
pytestmark = pytest.mark.usefixtures("compiled_once")

KPROBES = Path("/sys/kernel/debug/kprobes/list")
XDP = 6
#: A ring that is soon full.
SMALL = 8 * 4096
_DEADLINE = 20.0

KINDS = {
    "kprobe-ring": (KprobeSource, True),
    "kprobe-perf": (KprobeSource, False),
    "fentry-ring": (FentrySource, True),
    "fentry-perf": (FentrySource, False),
}


def only_on(kernel, *values):
    """Parameters of a test that need be tried on one kernel alone."""
    return pytest.param(*values, marks=pytest.mark.only_on(kernel))


@pytest.fixture(scope="module", params=list(KINDS))
def opened(request, compiled_once):
    construct, ring = KINDS[request.param]
    there = images_now()
    source = construct(ring=ring)
    yield source
    source.close()
    # Its own programs and trampolines go a grace period later: the next would see them go.
    deadline = time.monotonic() + _DEADLINE
    while images_now() - there and time.monotonic() < deadline:
        time.sleep(0.1)


def images_now():
    """All BPF symbols but the dispatcher, which stays when it was made."""
    names = rawbpf.kallsyms_bpf()
    return {(start, name) for start, name in names.items() if "dispatcher" not in name}


@pytest.fixture
def source(opened):
    """Started, and with nothing waiting."""
    settle(opened)
    return opened


def settle(source, seconds=0.3):
    """Read until nothing has come for a while: images are freed a grace period late."""
    quiet = time.monotonic() + seconds
    while (left := quiet - time.monotonic()) > 0:
        select.select([source.fileno()], [], [], left)
        if source.read():
            quiet = time.monotonic() + seconds


def read_until(source, fits, seconds=_DEADLINE):
    """What was read until it ``fits``; waits for the source's descriptor alone."""
    changes = source.read()
    deadline = time.monotonic() + seconds
    while not fits(changes):
        left = deadline - time.monotonic()
        assert left > 0, changes
        select.select([source.fileno()], [], [], left)
        changes += source.read()
    return changes


def of_kind(changes, kind):
    return [change for change in changes if isinstance(change, kind)]


def of(names, info, changes):
    """The changes of one program, told by its names: addresses and ids are what is tested."""
    own = {names[start] for start in info.starts}
    return [
        change
        for change in changes
        if isinstance(change, Loss)
        or (change.symbol.name if isinstance(change, Load) else change.name) in own
    ]


def kernel_programs():
    """The ids of all programs, by bpftool."""
    shown = json.loads(procs.run(["bpftool", "-j", "prog", "list"], 60).out)
    return {each["id"] for each in shown}


def fds():
    held = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            held[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return sorted(held.items())


def test_a_program_comes_and_goes_exactly(source):
    before = time.monotonic_ns()
    fd = programs.plain("exactly_this", 21)
    after = time.monotonic_ns()
    info, names = rawbpf.info(fd), rawbpf.kallsyms_bpf()
    assert select.select([source.fileno()], [], [], 0)[0]
    (load,) = of(names, info, source.read())
    start = info.starts[0]
    assert (load.symbol.start, load.symbol.end) == (start, start + info.lens[0])
    assert load.symbol.name == names[start]
    assert (load.prog_id, load.pid, load.open_ended) == (info.id, os.getpid(), False)
    assert load.comm == Path("/proc/self/comm").read_text().rstrip("\n")
    assert before <= load.earliest == load.latest <= after
    before = time.monotonic_ns()
    os.close(fd)
    after = time.monotonic_ns()
    (unload,) = of(names, info, source.read())
    assert (unload.start, unload.name) == (start, names[start])
    assert before <= unload.earliest == unload.latest <= after


def test_subprograms_come_with_their_program_s_id(source):
    functions = ["the_main_function_of_it", "left_function", "right_function"]
    fd = programs.with_subprograms("with_subs", functions, 22)
    info, names = rawbpf.info(fd), rawbpf.kallsyms_bpf()
    loads = of(names, info, source.read())
    ranges = {load.symbol.start: load.symbol.end for load in loads}
    assert ranges == {s: s + n for s, n in zip(info.starts, info.lens)}
    assert all(load.symbol.name == names[load.symbol.start] for load in loads)
    assert {load.prog_id for load in loads} == {info.id}
    os.close(fd)
    unloads = of(names, info, source.read())
    assert {unload.start for unload in unloads} == set(info.starts)
    assert len(unloads) == 3


def test_a_name_of_full_length_is_whole(source):
    function = "f" * 127
    fd = programs.with_subprograms("long", [function, function[:-1] + "g"], 23)
    names = rawbpf.kallsyms_bpf()
    loads = of(names, rawbpf.info(fd), source.read())
    assert len(loads) == 2
    assert all(load.symbol.name == names[load.symbol.start] for load in loads)
    assert max(len(load.symbol.name) for load in loads) > 127
    os.close(fd)


def test_a_trampoline_comes_and_goes(source):
    tracer = images.tracer()
    try:
        names = rawbpf.kallsyms_bpf()
        loads = of_kind(source.read(), Load)
    finally:
        rawbpf.close(*tracer)
    (image,) = [load for load in loads if load.symbol.kind == BPF_TRAMPOLINE]
    symbol = image.symbol
    assert names[symbol.start] == symbol.name
    assert image.open_ended == (symbol.end - symbol.start >= 4096)
    # Its true end leaves its neighbours alone.
    assert not [start for start in names if symbol.start < start < symbol.end]
    gone = (symbol.start, symbol.name)

    def is_gone(changes):
        return gone in [(each.start, each.name) for each in of_kind(changes, Unload)]

    read_until(source, is_gone)


def test_a_dispatcher_comes(source):
    known = "bpf_dispatcher_xdp" in rawbpf.kallsyms_bpf().values()
    fd = programs.plain("to_dispatch", 24, prog_type=XDP)
    rawbpf.test_run(fd, 1000)
    names = rawbpf.kallsyms_bpf()
    loads = of_kind(source.read(), Load)
    os.close(fd)
    assert "bpf_dispatcher_xdp" in names.values()
    images = [load.symbol for load in loads if load.symbol.kind == BPF_DISPATCHER]
    # It is made once and stays.
    assert [names[symbol.start] for symbol in images] == ["bpf_dispatcher_xdp"] * (not known)


def test_struct_ops_images_come_and_go(source):
    control = structops.CongestionControl("ksym_test_cc")
    names = {s: n for s, n in rawbpf.kallsyms_bpf().items() if n.startswith("bpf__")}
    loads = of_kind(source.read(), Load)
    control.close()
    images = [load for load in loads if load.symbol.kind == BPF_STRUCT_OPS]
    assert {load.symbol.start: load.symbol.name for load in images} == names
    if not names:
        pytest.skip("this kernel gives the images of struct_ops no symbols")
    assert sorted(names.values()) == [
        f"bpf__tcp_congestion_ops_{member}" for member in ("cong_avoid", "ssthresh", "undo_cwnd")
    ]
    ends = sorted((load.symbol.start, load.symbol.end, load.open_ended) for load in images)
    # One after the other in a page: an end past the next one's start would be wrong.
    assert all(end <= following for (_, end, _), (following, _, _) in zip(ends, ends[1:]))
    assert not any(rounded for _, _, rounded in ends)
    gone = {load.symbol.start for load in images}
    read_until(source, lambda changes: gone <= {each.start for each in of_kind(changes, Unload)})


def test_the_snapshot_is_the_kernel_s(source):
    held = [programs.plain(f"held_{index}", 30 + index) for index in range(5)]
    source.read()
    loads = source.snapshot()
    names = rawbpf.kallsyms_bpf()
    assert {load.symbol.start: load.symbol.name for load in loads} == names
    for fd in held:
        info = rawbpf.info(fd)
        (load,) = [each for each in loads if each.prog_id == info.id]
        assert load.symbol.end == info.starts[0] + info.lens[0]
    burst.unload(held)
    settle(source)
    # By now it asks bpf(2) alone, unless images were lost: programs are all the same.
    again = [load for load in source.snapshot() if load.symbol.kind == BPF_PROG]
    programs_now = {s: n for s, n in rawbpf.kallsyms_bpf().items() if n.startswith("bpf_prog_")}
    assert {load.symbol.start: load.symbol.name for load in again} == programs_now


def test_what_the_probe_costs_is_measured(source):
    source.measure()
    before = source.stats()
    burst.unload(burst.load(10)[0])
    after = source.stats()
    assert after["add_runs"] - before["add_runs"] == 10
    assert after["del_runs"] - before["del_runs"] == 10
    assert after["add_ns"] > before["add_ns"] and after["del_ns"] > before["del_ns"]
    source.read()
    assert source.stats()["records"] == after["records"] + 20


def test_all_descriptors_close_on_exec(source):
    listed = "import os, sys; print(*os.listdir('/proc/self/fd'))"
    # close_fds would close them whether they are marked or not.
    done = subprocess.run(
        [sys.executable, "-c", listed], capture_output=True, text=True, check=True, close_fds=False
    )
    inherited = {int(fd) for fd in done.stdout.split()}
    ours = {int(fd) for fd, what in fds() if "bpf" in what or "perf" in what or "event" in what}
    assert len(ours) >= 5
    assert not ours & inherited - {0, 1, 2, 3}


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_lost_record_is_counted(kind):
    construct, ring = KINDS[kind]
    source = construct(ring_bytes=SMALL, ring=ring)
    try:
        # What the sources before left behind, trampolines above all.
        settle(source, 2.0)
        began = time.monotonic_ns()
        loaded, times = burst.load(600)
        burst.unload(loaded)
        ended = time.monotonic_ns()
        # Nothing comes any more: the tick alone makes the tail known.
        changes = read_until(source, lambda changes: total(changes) >= 1200, 5.0)
        assert total(changes) == 1200
        assert source.stats()["lost"] == sum(loss.count for loss in of_kind(changes, Loss)) > 0
        # Where the lost ones were is known to lie in the gaps.
        seen = {load.latest for load in of_kind(changes, Load)}
        losses = of_kind(changes, Loss)
        assert all(began <= loss.until and loss.since <= loss.until for loss in losses)
        assert min(loss.since for loss in losses) < ended
        for at, previous in zip(times, [began, *times]):
            if not any(previous <= stamp <= at for stamp in seen):
                assert any(loss.since <= at and previous <= loss.until for loss in losses)
        # And it goes on as if nothing had been.
        fd = programs.plain("afterwards", 25)
        assert [type(change) for change in source.read()] == [Load]
        os.close(fd)
    finally:
        source.close()


def total(changes):
    """Changes that came, and those that are known not to have."""
    losses = of_kind(changes, Loss)
    return len(changes) - len(losses) + sum(loss.count for loss in losses)


def test_losses_between_records_lie_between_them():
    source = KprobeSource(ring_bytes=SMALL)
    try:
        settle(source)
        first, _ = burst.load(500)
        changes = source.read()
        last, _ = burst.load(1)
        changes += source.read()
        (loss,) = of_kind(changes, Loss)
        loads = of_kind(changes, Load)
        assert loss.count + len(loads) == 501
        assert loads[-2].latest <= loss.since < loss.until <= loads[-1].latest
        burst.unload(first + last)
    finally:
        source.close()


@pytest.mark.slow
@pytest.mark.only_on("6.12")
def test_the_default_ring_holds_ten_thousand_loads_and_unloads():
    burst.allow(20_000)
    source = KprobeSource()
    try:
        settle(source)
        began = time.monotonic()
        loaded, _ = burst.load(10_000)
        ids = {rawbpf.info(fd).id for fd in loaded[::1000]}
        burst.unload(loaded)
        took = time.monotonic() - began
        began = time.monotonic()
        changes = source.read()
        read = time.monotonic() - began
        assert of_kind(changes, Loss) == []
        assert len(of_kind(changes, Load)) == len(of_kind(changes, Unload)) == 10_000
        assert ids <= {load.prog_id for load in of_kind(changes, Load)}
        print(f"10,000 loaded and unloaded in {took:.1f} s, read in {read:.2f} s")
        assert source.stats()["lost"] == 0
    finally:
        source.close()


@pytest.mark.slow
@pytest.mark.only_on("6.1")
def test_a_resync_costs_no_more_than_a_walk():
    burst.allow(5_000)
    source = KprobeSource()
    try:
        source.snapshot()
        held, _ = burst.load(2_000)
        source.read()
        infos = {info.id: info for info in map(rawbpf.info, held)}
        began = time.monotonic()
        assert len(list(ProgramReader().newer_than(0))) >= 2_000
        walked = time.monotonic() - began
        times = []
        for _ in range(2):
            began = time.monotonic()
            loads = source.snapshot()
            times.append(time.monotonic() - began)
            ends = {load.prog_id: load.symbol.end for load in loads if load.prog_id in infos}
            assert ends == {id: info.starts[0] + info.lens[0] for id, info in infos.items()}
        names = rawbpf.kallsyms_bpf()
        assert all(names[load.symbol.start] == load.symbol.name for load in loads)
        print(
            f"2,000 programs: walk {walked:.2f} s, resync {times[0]:.2f} s, again {times[1]:.2f} s"
        )
        assert times[0] < 3 * walked
        # None of them is opened again.
        assert times[1] < walked / 2
        burst.unload(held)
    finally:
        source.close()


def test_a_killed_process_leaves_nothing_attached():
    before = kernel_programs()
    code = (
        "from ksym_plugin.sources.probe import KprobeSource\n"
        "source = KprobeSource()\nprint('ready', flush=True)\ninput()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        assert child.stdout.readline() == "ready\n"
        assert "bpf_ksym_add" in KPROBES.read_text()
        child.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + _DEADLINE
    while kernel_programs() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert KPROBES.read_text() == ""
    assert kernel_programs() == before
    events = Path("/sys/kernel/tracing/kprobe_events")
    assert events.read_text() == ""


@pytest.mark.parametrize("construct", [KprobeSource, FentrySource])
@pytest.mark.parametrize("where", ["ticker", "map", "self-test", "rings"])
def test_a_start_that_fails_leaves_nothing(monkeypatch, construct, where):
    def fail(*_):
        raise SourceError("no") if where in ("map", "self-test") else OSError(12, "no memory")

    target, name = {
        "ticker": (probe, "Ticker"),
        "map": (probe, "possible_count"),
        "self-test": (probe, "self_test"),
        "rings": (probe, "open_rings"),
    }[where]
    construct().close()  # is compiled by now
    monkeypatch.setattr(target, name, fail)
    before, known = fds(), kernel_programs()
    with pytest.raises(SourceError):
        construct()
    assert fds() == before
    assert KPROBES.read_text() == ""
    assert kernel_programs() == known


@pytest.mark.slow
@pytest.mark.parametrize("ring", [only_on("6.1", True), only_on("6.12", False)])
def test_starting_and_stopping_a_hundred_times_leaks_nothing(ring):
    KprobeSource(ring=ring).close()
    before, known, sizes = fds(), kernel_programs(), []
    for _ in range(100):
        source = KprobeSource(ring=ring)
        assert of_kind(source.read(), Load)
        source.close()
        sizes.append(resident())
    assert fds() == before
    assert KPROBES.read_text() == ""
    assert kernel_programs() == known
    print("resident in kB:", sizes[::10])
    # A leak grows with every start; an allocator takes what it needs once.
    grown = [after - before for before, after in zip(sizes[9::10], sizes[19::10])]
    assert sorted(grown)[len(grown) // 2] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [only_on("6.1", "kprobe-ring"), only_on("6.12", "fentry-perf")])
def test_compiling_leaks_nothing(monkeypatch, kind):
    monkeypatch.setattr(probe, "BccProgram", BccProgram)
    construct, ring = KINDS[kind]
    before, known = fds(), kernel_programs()
    for _ in range(2):
        source = construct(ring=ring)
        source.read()
        source.close()
        assert fds() == before
        assert KPROBES.read_text() == ""
        assert kernel_programs() == known


def resident():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


_START = """
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.sources.probe import {0}
try:
    {0}().close()
except SourceError as error:
    print(error)
else:
    print("started")
"""


@pytest.mark.parametrize("name", [only_on("6.1", "KprobeSource"), only_on("6.12", "FentrySource")])
def test_missing_headers_have_a_sentence_and_the_terminal_nothing(name):
    script = _START.format(name)
    hidden = 'mount -t tmpfs none /lib/modules && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", hidden, "sh", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert f"the headers of this kernel ({os.uname().release}) are not installed" in done.stdout
    assert f"apt install linux-headers-{os.uname().release}" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["KprobeSource", "FentrySource"])
def test_an_ordinary_user_gets_a_sentence(name):
    script = "import os; os.setgid(65534); os.setuid(65534)\n" + _START.format(name)
    done = procs.run([sys.executable, "-c", script], 60)
    assert "CAP_BPF and CAP_PERFMON" in done.out


@pytest.mark.only_on("6.1")
def test_pypi_s_bcc_is_passed_over_for_the_system_s(tmp_path):
    package = tmp_path / "bcc"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('the wrong bcc')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    done = subprocess.run(
        [sys.executable, "-c", _START.format("KprobeSource")],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=environment,
    )
    assert (done.stdout, done.stderr) == ("started\n", "")

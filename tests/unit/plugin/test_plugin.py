"""The running plugin, over a source whose changes the test writes itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import warnings

import pytest

from ksym_hooks import PluginWarning, get_plugin_manager, hookimpl
from ksym_plugin import plugin
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.plugin import follower
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.symbols import AMONG_BPF, Loss
from tests.unit.helpers import BASE, load, unload
from tests.unit.hosts import Listener, Offers, Scripted, ask, fds, tasks, wait_until

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TEXT = 0xFFFF_FFFF_8100_0000
A, B = "bpf_prog_aaaaaaaaaaaaaaaa_a", "bpf_prog_bbbbbbbbbbbbbbbb_b"
LOST = "changes around that time may have been lost"


def statics():
    return Kallsyms.parse(b"%x T _text\n%x T start_kernel\n%x T rest\n" % (TEXT, TEXT, TEXT + 64))


@pytest.fixture
def offers(monkeypatch):
    """A third party's source, asked for by name; this machine's kernel has no say."""
    monkeypatch.setenv("KSYM_SOURCE", "scripted")
    monkeypatch.setattr(follower.Kallsyms, "load", statics)
    return Offers("scripted", Scripted)


@pytest.fixture
def host(offers):
    with get_plugin_manager() as manager:
        manager.register(offers, "offers")
        yield manager


def now():
    return time.monotonic_ns()


def started(host, offers, *held):
    """The source of a plugin that has been asked once."""
    offers.construct = lambda: Scripted(held)
    assert ask(host, [TEXT]) == ["start_kernel exact"]
    return offers.made[-1]


def test_nothing_is_opened_before_the_first_question(offers):
    before, threads = fds(), tasks()
    with get_plugin_manager() as manager:
        manager.register(offers, "offers")
        assert (fds(), tasks(), offers.made) == (before, threads, [])
        ask(manager, [TEXT])
        assert tasks() == threads + 1
        assert len(offers.made) == 1
    assert fds() == before
    wait_until(lambda: tasks() == threads)
    assert offers.made[0].closed == 1


def test_every_kind_of_address_is_answered_in_order(host, offers):
    started(host, offers, load(BASE, 64, A, 1))
    chain = [BASE + 4, TEXT + 3, 0xFFFF_FFFF_FFFF_FF80, 0x7FFF_0000, BASE + 0x10000, BASE + 4]
    assert ask(host, chain) == [
        f"{A} exact",
        "start_kernel exact",
        "a perf context marker, not a frame",
        "a user address",
        AMONG_BPF.text,
        f"{A} exact",
    ]
    assert ask(host, []) == []


def test_a_change_is_in_the_next_answer_that_is_about_later(host, offers):
    """Nobody waits for the thread: who asks about a time makes sure that it was read."""
    source = started(host, offers)
    for turn in range(20):
        name = f"bpf_prog_{turn:016x}_p"
        loaded = now()
        source.waiting.append(load(BASE, 64, name, loaded))
        assert ask(host, [BASE], now()) == [f"{name} exact"]
        unloaded = now()
        source.waiting.append(unload(BASE, unloaded, name))
        assert ask(host, [BASE], unloaded + 1) == [f"{name} grace"]
        assert ask(host, [BASE], loaded) == [f"{name} exact"]


def test_a_past_instant_is_answered_on_every_clock(host, offers):
    source = started(host, offers)
    first, boottime, realtime = now(), time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.time_ns()
    apart = 100_000_000
    source.put(load(BASE, 64, A, first - apart), unload(BASE, first + apart, A))
    source.put(load(BASE, 64, B, first + apart))
    wait_until(lambda: ask(host, [BASE]) == [f"{B} exact"])
    for clock, at in (("monotonic", first), ("boottime", boottime), ("realtime", realtime)):
        # Before the first snapshot nobody watched: the name of then is known, with a doubt.
        assert ask(host, [BASE], at, clock)[0].split()[0] == A
        assert ask(host, [BASE], at + 2 * apart, clock)[0].split()[0] == B


def test_an_unknown_clock_is_a_reason(host, offers):
    started(host, offers)
    assert ask(host, [BASE, TEXT], 1, "sundial") == ["there is no clock called sundial"] * 2


def test_notifications_come_in_order_with_generations(host, offers):
    listener = Listener()
    host.register(listener, "listener")
    source = started(host, offers, load(BASE, 64, A, 1))
    wait_until(lambda: listener.changes)
    # The first is for those that kept what they were told before the source had started.
    assert [change[:2] for change in listener.changes] == [([], [])]
    generation = listener.changes[0][2]
    source.put(unload(BASE, now(), A), load(BASE, 64, B, now()))
    wait_until(lambda: len(listener.changes) == 2)
    assert listener.changes[1] == ([B], [A], generation + 1)
    source.put(unload(BASE + 0x1000, now(), "nothing known"))
    source.put(unload(BASE, now(), B))
    wait_until(lambda: len(listener.changes) == 3)
    assert listener.changes[2] == ([], [B], generation + 2)
    assert listener.losses == []


def test_a_cache_by_generation_never_outlives_a_change(host, offers):
    """The host's side of the contract: note the generation, then ask, then keep."""
    current = [0]

    class Cache:
        @hookimpl
        def ksym_symbols_changed(self, generation):
            current[0] = generation

    host.register(Cache(), "cache")
    source = started(host, offers)
    kept = {}
    for turn in range(50):
        name, before = f"bpf_prog_{turn:016x}_p", current[0]
        source.put(load(BASE, 64, name, now()))
        wait_until(lambda before=before: current[0] > before)
        key = BASE, current[0]
        if key not in kept:
            kept[key] = ask(host, [BASE])
        assert kept[key] == [f"{name} exact"]


def test_a_host_may_ask_and_stop_from_a_notification(host, offers):
    answers = []

    class Curious:
        @hookimpl
        def ksym_symbols_changed(self, added):
            if added:
                answers.extend(ask(host, [BASE]))
                host.close()

    host.register(Curious(), "curious")
    threads = tasks()
    source = started(host, offers)
    source.put(load(BASE, 64, A, now()))
    wait_until(lambda: tasks() == threads)
    assert answers == [f"{A} exact"]
    assert source.closed == 1


def test_a_loss_is_told_and_marks_its_window_until_a_resync(host, offers):
    listener = Listener()
    host.register(listener, "listener")
    source = started(host, offers, load(BASE, 64, A, 1))
    since, until = now(), now() + 1
    # What the lost changes had done, the snapshot shows.
    source.held = [load(BASE, 64, B, 2)]
    source.put(Loss(since, until, "ring full", 7))
    wait_until(lambda: ask(host, [BASE]) == [f"{B} exact"])
    wait_until(lambda: len(listener.losses) == 2)
    assert listener.losses[0] == (since, until, 7)
    assert listener.losses[1][0] == until
    assert ask(host, [BASE], since)[0] in (f"{A} gap", LOST, f"{B} gap")
    assert ask(host, [BASE + 0x10000], since) == [LOST]
    assert ask(host, [TEXT], since) == ["start_kernel exact"]
    assert listener.changes[-1][2] > 1


def test_before_the_plugin_watched_all_is_uncertain(host, offers):
    before = now()
    started(host, offers, load(BASE, 64, A, 1))
    assert ask(host, [BASE], before) == [f"{A} gap"]
    assert ask(host, [BASE + 0x10000], before) == [LOST]
    assert ask(host, [BASE], now()) == [f"{A} exact"]


def test_a_source_without_descriptor_is_never_taken_for_current(host, offers):
    """It is read on a clock; what it has not seen yet is not vouched for."""

    class Slow(Scripted):
        interval = 3600.0

        def fileno(self):
            return -1

    offers.construct = lambda: Slow([load(BASE, 64, A, 1)])
    assert ask(host, [BASE]) == [f"{A} exact"]
    assert ask(host, [BASE], now()) == [f"{A} gap"]


def test_a_listener_that_raises_is_no_failure_of_the_source(host, offers):
    told = []

    class Deaf:
        @hookimpl
        def ksym_symbols_changed(self, generation):
            told.append(generation)
            raise LookupError

    host.register(Deaf(), "deaf")
    source = started(host, offers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(2):
            before = len(told)
            source.put(load(BASE + 64 * number, 64, A, now()))
            wait_until(lambda before=before: len(told) > before)
    assert ask(host, [BASE + 64], now()) == [f"{A} exact"]
    assert offers.made == [source]
    assert not source.closed


def test_a_thread_that_cannot_start_leaves_no_descriptor(host, offers, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    before = fds()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            plugin.begin()
    assert fds() == before
    assert started(host, offers)


def test_a_source_that_fails_is_opened_again_and_the_time_between_is_a_gap(host, offers):
    source = started(host, offers, load(BASE, 64, A, 1))
    offers.construct = lambda: Scripted([load(BASE, 64, B, 2)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        failed = now()
        source.fail(OSError(5, "gone"))
        wait_until(lambda: ask(host, [BASE]) == [f"{B} exact"])
    assert "source scripted: OSError(5, 'gone')" in str(caught[0].message)
    assert source.closed == 1
    assert len(offers.made) == 2
    assert ask(host, [BASE], failed)[0].endswith(" gap")


def test_a_source_that_fails_while_a_host_asks_is_opened_again_as_well(host, offers):
    source = started(host, offers, load(BASE, 64, A, 1))
    offers.construct = lambda: Scripted([load(BASE, 64, B, 2)])
    # Nothing wakes the thread: it is the question that meets the error, once.
    source.error = LookupError("once")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ask(host, [BASE], now()) == [f"{A} gap"]
        wait_until(lambda: ask(host, [BASE]) == [f"{B} exact"])
    assert "source scripted: LookupError('once')" in str(caught[0].message)
    assert len(offers.made) == 2


@pytest.mark.parametrize(
    "error", [SourceError("not on this kernel", "use another"), RuntimeError("bug"), SystemExit(2)]
)
def test_a_source_that_cannot_start_leaves_static_names_and_doubt(host, offers, monkeypatch, error):
    def refuse():
        raise error

    monkeypatch.setattr(follower.snapshot, "take", lambda: Held([load(BASE, 64, A, 1)]))
    offers.construct = refuse
    threads = tasks()
    with pytest.warns(PluginWarning, match="source scripted: "):
        assert ask(host, [BASE, TEXT, BASE + 0x10000]) == [f"{A} gap", "start_kernel exact", LOST]
    wait_until(lambda: tasks() == threads)


class Held:
    def __init__(self, loads):
        self.loads = loads


def test_a_source_that_hangs_at_start_does_not_keep_the_host_waiting(host, offers, monkeypatch):
    monkeypatch.setattr(follower.snapshot, "take", lambda: Held([load(BASE, 64, A, 1)]))
    go = threading.Event()

    def hang():
        go.wait(20)
        return Scripted([load(BASE, 64, B, 2)])

    offers.construct = hang
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ask(host, [BASE, TEXT]) == [f"{A} gap", "start_kernel exact"]
        assert ask(host, [BASE]) == [f"{A} gap"]
    (warning,) = caught
    assert str(warning.message).startswith("ksym: source scripted has not started after 1 s")
    go.set()
    wait_until(lambda: ask(host, [BASE]) == [f"{B} exact"])


def test_a_source_by_an_unknown_name_is_said_to_be_so(host, monkeypatch):
    monkeypatch.setenv("KSYM_SOURCE", "nonesuch")
    monkeypatch.setattr(follower.snapshot, "take", lambda: Held([]))
    with pytest.warns(PluginWarning, match="there is no event source called nonesuch"):
        ask(host, [BASE])


def test_third_parties_are_tried_after_the_built_in_sources(host, offers, monkeypatch):
    def none(name):
        raise SourceError("none of ours")

    monkeypatch.setenv("KSYM_SOURCE", "auto")
    monkeypatch.setattr(plugin, "open_source", none)
    offers.construct = lambda: Scripted([load(BASE, 64, A, 1)])
    assert ask(host, [BASE]) == [f"{A} exact"]


def test_two_hosts_share_one_source_and_the_last_one_stops_it(host, offers):
    threads = tasks()
    source = started(host, offers, load(BASE, 64, A, 1))
    one, other = Listener(), Listener()
    host.register(one, "listener")
    with get_plugin_manager() as second:
        second.register(other, "listener")
        assert ask(second, [BASE]) == [f"{A} exact"]
        assert (tasks(), len(offers.made)) == (threads + 1, 1)
        source.put(load(BASE + 64, 64, B, now()))
        wait_until(lambda: one.changes[-1:] == other.changes[-1:] != [])
    assert source.closed == 0
    assert ask(host, [BASE]) == [f"{A} exact"]
    host.close()
    assert source.closed == 1
    wait_until(lambda: tasks() == threads)
    assert ask(host, [BASE]) == ["the plugin has been stopped"]


def test_starting_twice_is_starting_once_and_starting_again_works(host, offers):
    threads = tasks()
    with host:
        with host:
            started(host, offers)
        assert offers.made[0].closed == 1
        wait_until(lambda: tasks() == threads)
        host.start()
        host.start()
        started(host, offers, load(BASE, 64, A, 1))
        assert ask(host, [BASE]) == [f"{A} exact"]
        assert len(offers.made) == 2


def test_a_child_keeps_what_was_known_and_says_so(host, offers):
    before = set(fds())
    source = started(host, offers, load(BASE, 64, A, 1))
    known = now()
    assert ask(host, [BASE], known) == [f"{A} exact"]
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        report = []
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                report += ask(host, [BASE, TEXT]) + ask(host, [BASE], now())
                report += ask(host, [BASE], known)
            report += [str(len(caught)), str(caught[0].message), str(tasks())]
            report.append(str(set(fds()) - before - {read_fd, write_fd}))
            host.close()
            host.start()
            offers.construct = lambda: Scripted([load(BASE, 64, B, 2)])
            report += ["again", *ask(host, [BASE])]
            host.close()
        finally:
            os.write(write_fd, "\n".join(report).encode())
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as file:
        told = file.read().splitlines()
    os.waitpid(child, 0)
    assert told[:4] == [f"{A} gap", "start_kernel exact", f"{A} gap", f"{A} exact"]
    assert told[4] == "1"
    assert "this process was forked" in told[5]
    assert told[6] == "1"
    assert told[7] == "set()"
    assert told[-2:] == ["again", f"{B} exact"]
    # And the parent goes on as if nothing had been.
    source.put(load(BASE + 64, 64, B, now()))
    wait_until(lambda: ask(host, [BASE + 64]) == [f"{B} exact"])
    assert source.closed == 0


def test_forking_while_others_ask_never_deadlocks(host, offers):
    source = started(host, offers, load(BASE, 64, A, 1))
    over = threading.Event()

    def keep_asking():
        while not over.is_set():
            ask(host, [BASE, TEXT])

    askers = [threading.Thread(target=keep_asking) for _ in range(3)]
    for asker in askers:
        asker.start()
    try:
        for turn in range(20):
            source.put(load(BASE + 64, 64, f"bpf_prog_{turn:016x}_p", now()))
            child = os.fork()
            if child == 0:
                warnings.simplefilter("ignore")
                os._exit(0 if ask(host, [BASE]) == [f"{A} gap"] else 1)
            wait_until(lambda child=child: os.waitpid(child, os.WNOHANG) == (child, 0))
    finally:
        over.set()
        for asker in askers:
            asker.join()


_CLOSES_ALL = """
import os, sys, time, warnings
from ksym_hooks import get_plugin_manager
from ksym_plugin.plugin import follower
from tests.unit.hosts import Offers, Scripted, ask, fds, wait_until
from tests.unit.plugin.test_plugin import A, B, BASE, load, statics
os.environ["KSYM_SOURCE"] = "scripted"
follower.Kallsyms.load = statics
made = iter([[load(BASE, 64, A, 1)], [load(BASE, 64, B, 2)]])
offers = Offers("scripted", lambda: Scripted(next(made)))
with get_plugin_manager() as host:
    host.register(offers, "offers")
    assert ask(host, [BASE]) == [A + " exact"]
    said = []
    warnings.showwarning = lambda message, *rest: said.append(str(message))
    os.closerange(3, 64)
    # The numbers are at once somebody else's.
    mine = [os.open("/dev/null", os.O_RDWR) for _ in range(40)]
    assert max(mine) < 64
    wait_until(lambda: ask(host, [BASE]) == [B + " exact"])
    assert said == ["ksym: the host has closed all descriptors; the source is opened again"], said
for fd in mine:
    os.fstat(fd)
assert {fd for fd in fds() if fd > 2} == set(mine), fds()
print("fine")
"""


def test_a_host_that_closes_all_descriptors_loses_nothing_of_its_own():
    done = subprocess.run(
        [sys.executable, "-c", _CLOSES_ALL],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=REPO,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "fine\n", done.stderr


_NEVER_STOPS = """
import os
from ksym_hooks import get_plugin_manager
from tests.unit.hosts import Offers, Scripted, ask
from tests.unit.plugin.test_plugin import A, BASE, load
os.environ["KSYM_SOURCE"] = "scripted"
class Said(Scripted):
    def close(self):
        super().close()
        print("closed", flush=True)
offers = Offers("scripted", lambda: Said([load(BASE, 64, A, 1)]))
host = get_plugin_manager()
host.register(offers, "offers")
print(*ask(host, [BASE]))
"""


def test_a_host_that_never_stops_the_plugin_ends_when_it_ends():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _NEVER_STOPS],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=REPO,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{A} exact\nclosed\n"


def test_a_host_with_an_event_loop(host, offers):
    """The first question in a thread, the others as they come; news over call_soon_threadsafe."""

    async def work():
        loop, heard = asyncio.get_running_loop(), asyncio.Queue()

        class Bridge:
            @hookimpl
            def ksym_symbols_changed(self, added):
                names = [symbol.name for symbol in added]
                loop.call_soon_threadsafe(heard.put_nowait, names)

        host.register(Bridge(), "bridge")
        await loop.run_in_executor(None, ask, host, [TEXT])
        assert await asyncio.wait_for(heard.get(), 10) == []
        offers.made[0].put(load(BASE, 64, A, now()))
        assert await asyncio.wait_for(heard.get(), 10) == [A]
        began = loop.time()
        assert ask(host, [BASE]) == [f"{A} exact"]
        return loop.time() - began

    assert asyncio.run(work()) < 1


def test_a_signal_handler_may_ask_while_its_own_thread_is_asking(host, offers):
    import signal

    started(host, offers, load(BASE, 64, A, 1))
    answers = []
    previous = signal.signal(signal.SIGALRM, lambda *_: answers.append(ask(host, [BASE])))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        wait_until(lambda: ask(host, [BASE, TEXT] * 50) and len(answers) >= 200)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert answers == [[f"{A} exact"]] * len(answers)


def test_modules_that_come_later_get_their_names(host, offers, monkeypatch):
    source = started(host, offers)
    fresh = b"%x T _text\n%x T start_kernel\n%x t added_later\t[added]\n%x t next\t[added]\n"
    at = 0xFFFF_FFFF_C050_0000
    table = Kallsyms.parse(fresh % (TEXT, TEXT, at, at + 64))
    assert ask(host, [at]) == ["no symbol is known at this address"]
    monkeypatch.setattr(follower.Kallsyms, "load", lambda: table)
    monkeypatch.setattr(follower, "extents", lambda: {"added": (at, 4096)})
    source.put()
    wait_until(lambda: ask(host, [at]) == ["added_later exact"])

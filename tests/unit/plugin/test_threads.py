"""Many threads ask while a thousand changes a second arrive; who was where is arithmetic."""

from __future__ import annotations

import random
import threading
import time

from ksym_hooks import get_plugin_manager
from ksym_plugin.plugin import follower
from tests.unit import hosts
from tests.unit.hosts import Listener, Offers, Schedule, fds, tasks, wait_until
from tests.unit.plugin.test_plugin import statics

THREADS = 8
LOOK_UPS = 20_000
BATCH = 20


class Asker(threading.Thread):
    """Asks batches about past instants, most of them of just now, and judges each answer."""

    def __init__(self, manager, source, seed, count):
        super().__init__()
        self._resolve = manager.hook.ksym_resolve_frames
        self._source = source
        self._pick = random.Random(seed)
        self._count = count
        self.judged = 0
        self.wrong = []
        self.error = None

    def run(self):
        try:
            for _ in range(self._count // BATCH):
                self.ask()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
            self.error = error

    def ask(self):
        pick, source = self._pick, self._source
        age = pick.choice((1_000, 100_000, 10_000_000, 1_000_000_000))
        at = max(time.monotonic_ns() - pick.randrange(age), source.began + hosts.STEP)
        if (at - source.began) % hosts.STEP == 0:
            at += 1
        slots = [pick.randrange(hosts.SLOTS) for _ in range(BATCH)]
        addresses = [hosts.place(slot) + pick.randrange(hosts.SIZE) for slot in slots]
        answers = self._resolve(addresses=addresses, time=at, clock="monotonic")
        for slot, answer in zip(slots, answers):
            truth = source.truth(slot, at)
            named = hasattr(answer, "certainty")
            told = (answer.name, answer.certainty) if named else None
            self.judged += 1
            if told != truth:
                self.wrong.append((slot, at - source.began, told or answer, truth))


def test_eight_threads_never_get_a_wrong_answer(monkeypatch):
    monkeypatch.setenv("KSYM_SOURCE", "schedule")
    monkeypatch.setattr(follower.Kallsyms, "load", statics)
    offers, listener = Offers("schedule", Schedule), Listener()
    before, threads = set(fds()), tasks()
    with get_plugin_manager() as manager:
        manager.register(offers, "offers")
        manager.register(listener, "listener")
        manager.hook.ksym_resolve_frames(addresses=[], time=None, clock="monotonic")
        source = offers.made[0]
        # Nobody asks about an instant that is still to come.
        wait_until(lambda: time.monotonic_ns() > source.began + 2 * hosts.STEP)
        held, running = set(fds()), tasks()
        began, done = time.monotonic(), source.done
        askers = [Asker(manager, source, seed, LOOK_UPS) for seed in range(THREADS)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        took = time.monotonic() - began
        assert [asker.error for asker in askers] == [None] * THREADS
        assert [wrong for asker in askers for wrong in asker.wrong[:3]] == []
        assert sum(asker.judged for asker in askers) == THREADS * LOOK_UPS
        # What arrived meanwhile: a change each ms, as far as anybody has looked.
        assert source.done - done >= 900 * took
        wait_until(lambda: tasks() == running)
        assert set(fds()) == held
    wait_until(lambda: tasks() == threads)
    assert set(fds()) == before
    assert listener.losses == []
    generations = [generation for _, _, generation in listener.changes]
    assert generations == sorted(set(generations))
    print(f"{THREADS * LOOK_UPS / took:,.0f} look-ups/s, {source.done} changes in {took:.1f} s")

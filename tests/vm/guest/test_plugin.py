"""Many threads ask while a real kernel's programs come and go, as fast as a guest can.

The process that loads them says of each where it was, what it was called (bpf(2)'s tag and
name), and between which instants it surely was there. Answers are judged when all is over.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
import warnings

import pytest

from ksym_hooks import get_plugin_manager, hookimpl, is_frame
from tests.oracle import procs
from tests.unit.hosts import fds, tasks, wait_until

THREADS = 8
#: Few, since a guest is emulated; tests/unit/plugin/test_threads.py asks for 100,000.
LOOK_UPS = 1_000
BATCH = 20
_GRACE = 2_000_000_000

#: Keeps some programs and replaces them in turn, a change each ms if it can; a line of JSON
#: when one has come, and one when it has gone.
_CHURN = """
import json, os, sys, time
from tests.oracle import programs, rawbpf
held, number = [], 0
started = time.monotonic()
print("{}", flush=True)
while True:
    if len(held) >= 40:
        at, fd = held.pop(0)
        before = time.monotonic_ns()
        os.close(fd)
        print(json.dumps(["-", at, before, time.monotonic_ns()]), flush=True)
        time.sleep(max(0, started + 0.002 * number - time.monotonic()))
    before = time.monotonic_ns()
    fd = programs.plain(f"churn_{number}", number % 50 + 1, work=4 + number % 23)
    after = time.monotonic_ns()
    info = rawbpf.info(fd)
    name = f"bpf_prog_{info.tag}_{info.name}"
    print(json.dumps(["+", number, info.starts[0], info.lens[0], name, before, after]), flush=True)
    held.append((number, fd))
    number += 1
"""


class Program:
    __slots__ = ("after", "before", "end", "going", "gone", "name", "start")

    def __init__(self, start, length, name, before, after):
        self.start, self.end, self.name = start, start + length, name
        self.before, self.after = before, after
        self.going = self.gone = 1 << 63

    def surely(self, address, at):
        return self.start <= address < self.end and self.after <= at <= self.going

    def perhaps(self, address, at):
        return self.start <= address < self.end and self.before <= at <= self.gone + _GRACE


class Churn(threading.Thread):
    """Reads what the other process says."""

    def __init__(self):
        super().__init__(daemon=True)
        self.programs = []
        self.child = subprocess.Popen(
            [sys.executable, "-c", _CHURN],
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=procs.environment(),
            cwd=procs.REPO,
        )
        procs.read_line(self.child.stdout.fileno(), 60)
        self.start()

    def run(self):
        for line in self.child.stdout:
            sign, number, *told = json.loads(line)
            if sign == "+":
                self.programs.append(Program(*told))
            else:
                self.programs[number].going, self.programs[number].gone = told


class Asker(threading.Thread):
    def __init__(self, manager, churn, seed):
        super().__init__()
        self._resolve = manager.hook.ksym_resolve_frames
        self._churn = churn
        self._pick = random.Random(seed)
        self.asked = []
        self.error = None

    def run(self):
        try:
            for _ in range(LOOK_UPS // BATCH):
                self.ask()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
            self.error = error

    def ask(self):
        pick, programs = self._pick, self._churn.programs
        at = time.monotonic_ns() - pick.randrange(pick.choice((1_000, 1_000_000, 500_000_000)))
        recent = len(programs) - 1
        chosen = [programs[max(0, recent - pick.randrange(200))] for _ in range(BATCH)]
        addresses = [pick.randrange(program.start, program.end) for program in chosen]
        answers = self._resolve(addresses=addresses, time=at, clock="monotonic")
        told = [(a.name, a.certainty) if is_frame(a) else a.text for a in answers]
        self.asked.append((at, addresses, told))


def judge(programs, asked):
    """Answers about programs that were surely there, and what was wrong with any."""
    by_page = {}
    for program in programs:
        for page in range(program.start >> 12, (program.end >> 12) + 1):
            by_page.setdefault(page, []).append(program)
    sure, exact, wrong = 0, 0, []
    for at, addresses, told in asked:
        for address, answer in zip(addresses, told):
            near = by_page[address >> 12]
            there = [program for program in near if program.surely(address, at)]
            if there:
                sure += 1
                exact += answer == (there[0].name, "exact")
                right = isinstance(answer, str) or answer[0] == there[0].name
            else:
                maybe = {program.name for program in near if program.perhaps(address, at)}
                right = isinstance(answer, str) or answer[0] in maybe
            if not right:
                wrong.append((at, hex(address), answer, [program.name for program in there]))
    return sure, exact, wrong


@pytest.mark.slow
@pytest.mark.only_on("6.1")
def test_eight_threads_get_no_wrong_answer_while_programs_come_and_go(monkeypatch):
    # Not perf_event: each of its reads opens programs by id, which takes an emulated kernel
    # minutes at this rate. tests/live asks it on a real machine.
    monkeypatch.setenv("KSYM_SOURCE", "kprobe")
    lost, started = [], threading.Event()

    class Listener:
        @hookimpl
        def ksym_events_lost(self, since, until, count):
            lost.append((since, until, count))

        @hookimpl
        def ksym_symbols_changed(self):
            started.set()

    threads, before = tasks(), set(fds())
    with get_plugin_manager() as manager:
        manager.register(Listener(), "listener")
        with warnings.catch_warnings():
            # The probe is compiled for longer than a question waits.
            warnings.simplefilter("ignore")
            manager.hook.ksym_resolve_frames(addresses=[], time=None, clock="monotonic")
        assert started.wait(120)
        time.sleep(0.2)
        churn = Churn()
        wait_until(lambda: len(churn.programs) > 300, 60)
        running, held = tasks(), set(fds())
        came, began = len(churn.programs), time.monotonic()
        askers = [Asker(manager, churn, seed) for seed in range(THREADS)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        took = time.monotonic() - began
        rate = 2 * (len(churn.programs) - came) / took
        wait_until(lambda: tasks() == running)
        assert set(fds()) == held
        assert [asker.error for asker in askers] == [None] * THREADS
        procs.end_group(churn.child)
        churn.join(10)
    sure, exact, wrong = 0, 0, []
    for asker in askers:
        counts = judge(churn.programs, asker.asked)
        sure, exact, wrong = sure + counts[0], exact + counts[1], wrong + counts[2]
    print(
        f"{THREADS * LOOK_UPS / took:,.0f} look-ups/s, {rate:,.0f} changes/s; of {sure:,}"
        f" that were surely there {100 * exact / sure:.2f} % exact; {len(lost)} losses told"
    )
    assert wrong[:5] == []
    assert sure > THREADS * LOOK_UPS // 10
    assert exact == sure
    assert rate > 20
    wait_until(lambda: tasks() <= threads)
    assert set(fds()) <= before

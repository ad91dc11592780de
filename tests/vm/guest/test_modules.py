"""Modules of the stock kernel come and go, are sampled, and are named by who was there."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from bisect import bisect_right
from pathlib import Path

import pytest

from tests.oracle import procs, truth
from tests.vm.guest.around import CLI, HANDLER, SECONDS

#: Which are loaded in turn, and how often. raid6_pq measures itself for seconds.
TURNS = {("raid6_pq", "xor"): 4, ("wp512", "rmd160"): 8}


class Turn:
    """One loading of a module, as its loader wrote it down."""

    def __init__(self, line: str) -> None:
        told = json.loads(line)
        self.module = told["module"]
        self.came, self.there, self.going, self.gone = told["times"]
        self.starts = [start for start, _ in told["functions"]]
        self.names = [set(names) for _, names in told["functions"]]
        self.init = told["init"]

    def names_at(self, address: int, time: int) -> set[str]:
        """What the module's function there is called; empty if there is none at that time."""
        if self.came <= time <= self.gone and self.starts[0] <= address < self.starts[-1]:
            return self.names[bisect_right(self.starts, address) - 1]
        if not self.came <= time <= self.there:
            return set()
        return {name for start, end, name in self.init if start <= address < end}

    def bounds(self) -> list[int]:
        return [
            *self.starts,
            *(start for start, _, _ in self.init),
            *(end for _, end, _ in self.init),
        ]

    def is_of(self, life: dict) -> bool:
        """Whether a lifetime is that of this loading, by where and when it was."""
        start, end = int(life["start"], 16), int(life["end"], 16)
        if (life["name"], start) != (self.module, self.starts[0]) or life["unloaded"] is None:
            return False
        (loading, loaded), (unloading, unloaded) = life["loaded"], life["unloaded"]
        fits = self.starts[-2] < end <= self.starts[-1]
        came = self.came <= loaded and loading <= self.there
        return fits and came and self.going <= unloaded and unloading <= self.gone

    def overlaps(self, other: Turn) -> bool:
        return self.starts[0] < other.starts[-1] and other.starts[0] < self.starts[-1]


class Recorded:
    """Modules in turn under ``ksym record`` and ``perf record``, and what became of it."""

    def __init__(self, folder: Path, modules: tuple[str, str]) -> None:
        self.history, data = str(folder / "x.db"), str(folder / "perf.data")
        turns = str(folder / "turns")
        driver = [sys.executable, "-m", "tests.vm.guest.module_turns", turns, data]
        words = [*CLI, "record", "--stats", "-o", self.history, "--", *driver]
        words += [str(TURNS[modules]), *modules]
        self.said = procs.run(words, SECONDS).err
        with open(turns) as lines:
            self.turns = [Turn(line) for line in lines]
        script = ["perf", "script", "-i", data]
        self.alone = procs.run([*script, "--ns"], SECONDS).out
        done = procs.run([*script, "-s", HANDLER, "--", "-H", self.history], SECONDS)
        self.ours, self.tally = done.out, done.err

    def score(self, text: str) -> tuple[int, int, int, dict]:
        """Of the frames in modules: how many have a right name, a wrong one, none; which."""
        right = wrong = missing = 0
        seen: dict = {}
        bounds = [bound for turn in self.turns for bound in turn.bounds()]
        low, high = min(bounds), max(bounds)
        for sample in truth.samples(text):
            for frame in sample.frames:
                if not low <= frame.ip < high:
                    continue
                named = ((one, one.names_at(frame.ip, sample.time)) for one in self.turns)
                turn, names = next((pair for pair in named if pair[1]), (None, set()))
                if turn is None:
                    continue
                if frame.name in names:
                    right += 1
                elif frame.name == truth.UNKNOWN:
                    missing += 1
                else:
                    wrong += 1
                key = (turn.module, frame.name)
                seen[key] = seen.get(key, 0) + 1
        return right, wrong, missing, seen


def report(kernel: str, name: str, text: str) -> None:
    os.makedirs("/job/out", exist_ok=True)
    with open("/job/out/modules.txt", "a") as file:
        file.write(f"{kernel} {name}: {text}\n")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory):
    @functools.cache
    def of(*modules: str) -> Recorded:
        return Recorded(tmp_path_factory.mktemp("modules"), modules)

    return of


@pytest.mark.slow
@pytest.mark.parametrize("modules", TURNS, ids="-".join)
def test_every_sample_in_a_module_has_its_name(recordings, kernel, modules) -> None:
    recorded = recordings(*modules)
    turns = recorded.turns
    assert len(turns) == TURNS[modules]
    reused = sum(
        one.overlaps(two) for one, two in zip(turns, turns[1:]) if one.module != two.module
    )
    right, wrong, missing, seen = recorded.score(recorded.ours)
    alone = recorded.score(recorded.alone)
    report(
        kernel,
        "-".join(modules),
        f"{right} right, {wrong} wrong, {missing} missing; perf alone {alone[:3]};"
        f" {reused} of {len(turns) - 1} took a place of the one before;"
        f" {os.path.getsize(recorded.history)} bytes; {recorded.said}; {recorded.tally}; {seen}",
    )
    assert (wrong, missing) == (0, 0), seen
    assert right > 50
    # What xor measures is over in no time.
    assert {module for module, _ in seen} >= set(modules) - {"xor"}
    shown = [*CLI, "show", "-H", recorded.history, "--all", "--json", "--clock", "monotonic"]
    lives = json.loads(procs.run(shown, SECONDS).out)["symbols"]
    assert [len([life for life in lives if turn.is_of(life)]) for turn in turns] == [1] * len(turns)


@pytest.mark.slow
def test_a_module_is_named_by_its_time_after_it_is_gone(recordings) -> None:
    """By ``ksym resolve``, also where another module is there now."""
    recorded = recordings("wp512", "rmd160")

    def resolve(at: int, *addresses: int) -> list[dict]:
        words = ["resolve", "-H", recorded.history, "--clock", "monotonic", "--json"]
        words += ["--at", f"{at / 1e9:.6f}", *map(hex, addresses)]
        found: list[dict] = json.loads(procs.run([*CLI, *words], SECONDS).out)
        return found

    for turn in recorded.turns[:2]:
        frames = resolve((turn.there + turn.going) // 2, *turn.starts[:3])
        for frame, names in zip(frames, turn.names):
            assert frame["name"] in names
            assert (frame["module"], frame["certainty"]) == (turn.module, "exact")
        (later,) = resolve(turn.gone + 1_000_000, turn.starts[0])
        assert later.get("module") != turn.module
    assert re.search(r"recording with \w+ into", recorded.said)

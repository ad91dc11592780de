"""The recorder with modules beside BPF: kept with their times, and never instead of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from ksym_plugin.sources import modules as modules_module
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.reconcile import differences
from ksym_plugin.timeline.resolver import Resolver
from ksym_plugin.timeline.symbols import EXACT, GAP, VACANT, Frame
from tests.unit import module_hosts
from tests.unit.helpers import BASE, load, told
from tests.unit.history.test_recorder import SECOND, Stage, stage

__all__ = ["stage"]
START = module_hosts.BASE + 0x10000 + module_hosts.CODE[0]


@pytest.fixture
def host(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    clock: Any = stage.time
    clock.monotonic = lambda: clock.monotonic_ns() / 1e9
    monkeypatch.setattr(modules_module, "time", clock)
    (tmp_path / "host").mkdir()
    return module_hosts.Host(tmp_path / "host")


def follow(stage: Stage, host: module_hosts.Host) -> Any:
    """Make the stage's recorder one that follows the host's modules."""
    earlier = [one for one in stage.writer.earlier if one.functions is not None]
    modules = host.follow(earlier, stage.writer.covered_before)
    stage.follow(modules=modules)
    return modules


def settle(stage: Stage, host: module_hosts.Host) -> None:
    """Steps until all that is asked is answered and committed."""
    for _ in range(3):
        stage.time.now += 2 * SECOND
        stage.recorder.step()
        if host.reader.fileno() >= 0:
            host.reader.answer()


def names(stage: Stage, time: int) -> object:
    found = Resolver(stage.past()).resolve(START + 4, time)
    return found.name if isinstance(found, Frame) else found


def test_modules_come_and_go_in_the_history(stage: Stage, host: module_hosts.Host) -> None:
    host.add("a", 1)
    modules = follow(stage, host)
    stage.recorder.start()
    settle(stage, host)
    first = stage.time.monotonic_ns()
    settle(stage, host)
    host.reader.rows["b"] = [(0x10, 0x80, "of_b")]
    host.remove("a")
    settle(stage, host)
    between = stage.time.monotonic_ns()
    settle(stage, host)
    host.add("b", 1)
    settle(stage, host)
    second = stage.time.monotonic_ns()
    stage.kernel.add(1)
    stage.recorder.finish()
    modules.close()
    assert (names(stage, first), names(stage, second)) == ("first", "of_b")
    assert names(stage, between) is VACANT
    past = stage.past()
    assert past.has_modules
    # BPF's changes are counted, and modules' are not.
    assert stage.recorder.tracker.changes == 1


def test_what_has_no_functions_yet_is_not_covered(stage: Stage, host: module_hosts.Host) -> None:
    modules = follow(stage, host)
    stage.recorder.start()
    settle(stage, host)
    host.add("a", 1)
    covered = stage.commits[-1]
    for _ in range(4):
        stage.time.now += 2 * SECOND
        stage.recorder.step()
    assert stage.commits[-1] < covered + 2 * SECOND
    host.reader.answer()
    settle(stage, host)
    assert stage.commits[-1] > covered + 6 * SECOND
    modules.close()


def test_the_end_waits_for_functions(stage: Stage, host: module_hosts.Host) -> None:
    host.add("a", 1)
    modules = follow(stage, host)
    stage.recorder.start()
    host.reader.answer()
    stage.recorder.finish()
    modules.close()
    assert [life.symbol.name for life in stage.past().lifetimes()] == ["a"]


def test_an_event_wakes_and_one_of_bpf_does_not_read_modules(
    stage: Stage, host: module_hosts.Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = follow(stage, host)
    stage.recorder.start()
    reads = []
    monkeypatch.setattr(modules, "read", lambda: reads.append(1) or [])
    reading, writing = os.pipe()
    os.write(writing, b"x")
    os.write(stage.kernel.writing, b"x")
    stage.recorder._committed = stage.time.now
    stage.recorder.run(None, reading)
    assert reads == []
    os.write(host.uevents.writing, b"x")
    stage.recorder.run(None, reading)
    assert reads == [1]
    os.close(reading)
    os.close(writing)
    modules.close()


def test_a_resync_of_bpf_ends_no_module(stage: Stage, host: module_hosts.Host) -> None:
    host.add("a", 1)
    modules = follow(stage, host)
    stage.recorder.start()
    settle(stage, host)
    stage.kernel.lists_images = True
    stage.kernel.lose(stage.time.monotonic_ns())
    settle(stage, host)
    assert stage.recorder.tracker.resyncs == 2
    assert [life.symbol.name for life in stage.recorder.timeline.live()] == ["a"]
    modules.close()
    (life,) = stage.recorder.timeline.open()
    listed = load(BASE, 64, "bpf_trampoline_1", (0, 5), None, open_ended=True)
    changes = differences({START: life}, [listed], True, (0, 10**15, 10**15))
    assert changes == [listed]


def test_lost_uevents_are_a_gap_and_bpf_is_compared_anew(
    stage: Stage, host: module_hosts.Host
) -> None:
    modules = follow(stage, host)
    stage.recorder.start()
    settle(stage, host)
    stage.kernel.add(1)
    settle(stage, host)
    at = stage.time.monotonic_ns()
    host.uevents.lost = True
    settle(stage, host)
    settle(stage, host)
    assert (stage.recorder.tracker.losses, stage.recorder.tracker.resyncs) == (1, 2)
    stage.recorder.finish()
    modules.close()
    past = stage.past()
    assert any(loss.cause == "modules' events" for loss in past.losses)
    assert told(past.at(BASE + 0x400, at + 1000)) == f"bpf_prog_{1:016x}_p {GAP}"


def test_the_next_session_ends_what_went_meanwhile(stage: Stage, host: module_hosts.Host) -> None:
    host.add("a", 1)
    host.add("stays", 2)
    modules = follow(stage, host)
    stage.recorder.start()
    settle(stage, host)
    stage.recorder.finish()
    modules.close()
    first_end = stage.past().sessions[0].covered
    host.remove("a", is_told=False)
    stage.time.now += 60 * SECOND
    host.uevents, host.reader = module_hosts.Uevents(), module_hosts.Reader()
    stage.open()
    modules = follow(stage, host)
    stage.recorder.start()
    began = stage.time.now
    settle(stage, host)
    stage.recorder.finish()
    modules.close()
    lives = {life.symbol.name: life for life in stage.past().lifetimes()}
    assert set(lives) == {"a", "stays"}
    assert lives["stays"].unloaded_latest is None
    gone = lives["a"]
    assert first_end <= (gone.unloaded_earliest or 0) <= (gone.unloaded_latest or 0) <= began


def test_names_of_bpf_are_kept_where_modules_cannot_be_followed_any_more(
    stage: Stage, host: module_hosts.Host
) -> None:
    host.add("a", 1)
    modules = follow(stage, host)
    stage.recorder.start()
    settle(stage, host)
    host.listing.unlink()
    stage.kernel.add(1)
    settle(stage, host)
    stage.kernel.add(2)
    at = stage.time.monotonic_ns()
    stage.recorder.finish()
    (note,) = modules.notes
    assert note.startswith("modules are not followed any more (")
    past = stage.past()
    assert not past.has_modules
    assert told(past.at(BASE + 0x800, at)) == f"bpf_prog_{2:016x}_p {EXACT}"
    assert issubclass(SourceError, Exception)
    modules.close()


def test_what_is_not_followed_any_more_wakes_nobody(stage: Stage, host: module_hosts.Host) -> None:
    modules = follow(stage, host)
    stage.recorder.start()
    host.listing.unlink()
    os.write(host.uevents.writing, b"x")
    polls = []
    step = stage.recorder.step

    def counted() -> None:
        polls.append(1)
        step()

    stage.recorder.step = counted  # type: ignore[method-assign]
    reading, writing = os.pipe()
    stage.recorder._committed = stage.time.now
    stop = threading.Timer(0.3, os.write, (writing, b"x"))
    stop.start()
    stage.recorder.run(None, reading)
    stop.join()
    assert modules.notes
    assert len(polls) < 10
    os.close(reading)
    os.close(writing)

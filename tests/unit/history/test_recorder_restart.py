"""A recorder that goes on where one ended, random kernels, and what wakes it."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from ksym_plugin.timeline.symbols import EXACT
from tests.unit.helpers import BASE, told
from tests.unit.history.test_recorder import SECOND, Stage, stage

__all__ = ["stage"]


def test_next_session_goes_on_with_what_lived(stage: Stage) -> None:
    kernel = stage.kernel
    for slot in (1, 2, 3):
        kernel.add(slot)
    stage.recorder.start()
    stage.recorder.finish()
    stage.time.now += SECOND
    kernel.waiting.clear()
    kernel.muted = True
    kernel.remove(2)
    kernel.add(3)
    kernel.muted = False
    stage.time.now += SECOND
    stage.open()
    stage.recorder.start()
    assert stage.live() == stage.truth()
    now = stage.time.monotonic_ns()
    stage.recorder.step()
    stage.recorder.finish()
    past = stage.past()
    assert [one.prog_id for one in past.lifetimes()] == [1, 2, 3, 4]
    assert told(past.at(BASE + 0x400, now)) == f"bpf_prog_{1:016x}_p {EXACT}"
    assert told(past.at(BASE + 0xC00, now)) == f"bpf_prog_{4:016x}_p {EXACT}"
    first, second = past.sessions
    gone = next(one for one in past.lifetimes() if one.prog_id == 2)
    assert first.covered <= (gone.unloaded_earliest or 0)
    assert (gone.unloaded_latest or 0) <= second.covered
    assert told(past.at(BASE + 0x800, first.covered)) == f"bpf_prog_{2:016x}_p {EXACT}"


@pytest.fixture
def real(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stage with the real clock, and a pipe to stop it by."""
    monkeypatch.setattr(stage.time, "monotonic_ns", time.monotonic_ns)
    stage.recorder.start()
    stage.stop, stage.stopping = os.pipe()  # type: ignore[attr-defined]
    yield stage
    os.close(stage.stop)  # type: ignore[attr-defined]
    os.close(stage.stopping)  # type: ignore[attr-defined]


def test_run_ends_when_told(real: Any) -> None:
    os.write(real.stopping, b"x")
    real.recorder.run(None, real.stop)
    assert real.kernel.calls[-1] == "read"


def test_run_ends_when_time_is_up(real: Any) -> None:
    until = time.monotonic_ns() + 30_000_000
    real.recorder.run(until, real.stop)
    assert time.monotonic_ns() >= until


def test_run_wakes_for_a_change_long_before_a_heartbeat(real: Any) -> None:
    """The change arrives while it waits; being read, it stops the run itself."""
    kernel = real.kernel
    read, waits = kernel.read, []

    def reading() -> list:
        changes: list = read()
        if changes:
            os.read(kernel.reading, 1)
            waits.append(time.monotonic_ns())
            os.write(real.stopping, b"x")
        return changes

    kernel.read = reading
    real.recorder.step()

    def happen() -> None:
        kernel.add(1)
        os.write(kernel.writing, b"x")

    thread = threading.Thread(target=happen)
    thread.start()
    real.recorder.run(None, real.stop)
    thread.join()
    assert len(waits) == 1
    assert real.live() == real.truth()
    ((_, _, happened),) = kernel.held.values()
    assert waits[0] - happened < SECOND // 2

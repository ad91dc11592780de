"""Tests that run in a guest only, as root, from the checkout's root: see ``scripts/vm``."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from ksym_plugin.sources import probe
from ksym_plugin.sources.bcc_loader import BccProgram
from ksym_plugin.sources.probe_records import BpfRing
from tests.oracle import rawbpf
from tests.vm.guest import around

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

if os.environ.get("KSYM_GUEST") is None:
    # On the host they are not even imported: they need bcc and a kernel made for them.
    collect_ignore_glob = ["test_*.py"]

_MINUTES = float(os.environ.get("KSYM_GUEST_MINUTES", "45"))
_UNTIL = time.monotonic() + _MINUTES * 60


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those of this kernel; the fast ones first, each group in its own order."""
    others = [item for item in items if not _is_for(item, os.environ["KSYM_GUEST"])]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def _is_for(item: pytest.Item, kernel: str) -> bool:
    marker = item.get_closest_marker("only_on")
    return marker is None or kernel in marker.args


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with _in_time():
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with _in_time():
        yield


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """The guest's time is over: what is at work fails, and so does all that would follow.

    So a slow machine has a report that names what it did not get to.
    """
    left = _UNTIL - time.monotonic()
    if left <= 0:
        pytest.fail(f"not run: the guest's {_MINUTES:g} minutes are over", pytrace=False)
    signal.signal(signal.SIGALRM, _end)
    signal.setitimer(signal.ITIMER_REAL, left)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _end(_number: int, _frame: object) -> None:
    pytest.fail(f"the guest's {_MINUTES:g} minutes ended here")


@pytest.fixture(scope="session")
def kernel() -> str:
    """The series asked for: ``6.1`` or ``6.12``."""
    return os.environ["KSYM_GUEST"]


@pytest.fixture(params=["/usr/bin/perf", "/opt/perf-6.12/bin/perf"], ids=["perf-6.1", "perf-6.12"])
def perf(request: pytest.FixtureRequest) -> str:
    """Debian 12's own perf and its backports' one, on either kernel."""
    path: str = request.param
    return path


@pytest.fixture(scope="session")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what ``around.record`` has recorded."""
    folder = tmp_path_factory.mktemp("workloads")
    around.record(folder)
    return folder


class Compiled:
    """A program that was compiled before, opened again; ``pages`` are those of its ring."""

    def __init__(self, program: BccProgram, pages: int) -> None:
        self._fds = [os.dup(fd) for fd in program._fds]
        self.programs = self._fds[: len(program.programs)]
        self.maps = dict(zip(program.maps, self._fds[len(program.programs) :]))
        if pages:
            # Away with what nobody has read.
            ring = BpfRing(self.maps["events"], pages * 4096)
            ring.take()
            ring.close()

    def close(self) -> None:
        rawbpf.close(*self._fds)
        self._fds.clear()


@pytest.fixture(scope="session")
def compiled() -> Iterator[dict[Any, BccProgram]]:
    """What was compiled so far, by what was asked for. Of fentry it stays attached."""
    made: dict[Any, BccProgram] = {}
    yield made
    for program in made.values():
        program.close()


@pytest.fixture(scope="module")
def compiled_once(compiled: dict[Any, BccProgram]) -> Iterator[None]:
    """Sources start without the compiler, which takes ten seconds, but the first of a kind."""

    def load(flags: list[str], *rest: Any) -> Compiled:
        key = (*flags, *rest)
        if key not in compiled:
            compiled[key] = BccProgram(flags, *rest)
        (pages,) = [int(flag.partition("=")[2]) for flag in flags if "=" in flag] or [0]
        return Compiled(compiled[key], pages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "BccProgram", load)
        yield

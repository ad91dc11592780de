"""Tests that run in a guest only, as root, from the checkout's root: see ``scripts/vm``."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from tests.vm.guest import around

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

if os.environ.get("KSYM_GUEST") is None:
    # On the host they are not even imported: they need bcc and a kernel made for them.
    collect_ignore_glob = ["test_*.py"]

_MINUTES = float(os.environ.get("KSYM_GUEST_MINUTES", "30"))
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

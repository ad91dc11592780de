"""Makes ``tests.oracle`` importable from wherever pytest is started; keeps tests apart."""

from __future__ import annotations

import gc
import os
import signal
import sys

import pytest
from hypothesis import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

if REPO not in sys.path:
    sys.path.insert(0, REPO)

# A busy machine is slow; that says nothing about an example.
settings.register_profile("without_deadline", deadline=None)
settings.load_profile("without_deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Property tests take the longest: begun last, one would keep a single process at work."""
    items.sort(key=lambda item: "hypothesis" not in item.keywords)


@pytest.fixture(autouse=True)
def _as_python_starts() -> Iterator[None]:
    """What prepares an interpreter for handling samples alone is undone for the next test."""
    yield
    gc.enable()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)

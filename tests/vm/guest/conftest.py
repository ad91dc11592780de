"""Tests that run in a guest only, as root, from the checkout's root: see ``scripts/vm``."""

from __future__ import annotations

import os

import pytest

if os.environ.get("KSYM_GUEST") is None:
    # On the host they are not even imported: they need bcc and a kernel made for them.
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The fast ones first, each group in its own order."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="session")
def kernel() -> str:
    """The series asked for: ``6.1`` or ``6.12``."""
    return os.environ["KSYM_GUEST"]


@pytest.fixture(params=["/usr/bin/perf", "/opt/perf-6.12/bin/perf"], ids=["perf-6.1", "perf-6.12"])
def perf(request: pytest.FixtureRequest) -> str:
    """Debian 12's own perf and its backports' one, on either kernel."""
    path: str = request.param
    return path

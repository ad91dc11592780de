"""Every benchmark runs on this kernel; the figures are not judged."""

from __future__ import annotations

import json
import sys

import pytest

from bench.__main__ import SUBJECTS
from tests.oracle import procs


@pytest.mark.slow
@pytest.mark.usefixtures("perf_python")
@pytest.mark.parametrize("subject", list(SUBJECTS))
def test_no_benchmark_crashes(subject: str) -> None:
    words = [sys.executable, "-m", "bench", "--quick", "--json", "-", subject]
    report = json.loads(procs.run(words, 120).out)
    assert report["crashed"] == {}
    assert report["subjects"][subject]

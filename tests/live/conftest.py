"""Live tests need root, a bpf(2) that answers, and perf with Python in it.

``KSYM_RUN_KERNEL_TESTS`` unset: what is missing skips. ``=0``: all are skipped. ``=1``, or on
CI: what is missing fails, except a kernel whose bpf(2) hangs. Whatever was skipped or failed
that way is said once more at the end of the run.
"""

from __future__ import annotations

import functools
import glob
import os
import shutil
import sys

import pytest

from tests.oracle import probe, procs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

SKIP = "skip"
LACK = "lack"
FINE = "fine"

_said: list[str] = []


@functools.cache
def kernel_verdict() -> tuple[str, str]:
    """(FINE, "") or (SKIP or LACK, reason); SKIP is accepted everywhere, LACK is not on CI."""
    if os.environ.get("KSYM_RUN_KERNEL_TESTS") == "0":
        return SKIP, "KSYM_RUN_KERNEL_TESTS=0"
    if sys.platform != "linux":
        return LACK, "live tests need Linux"
    if os.geteuid() != 0:
        return LACK, "live tests need root"
    state, reason = probe.ask()
    return {probe.ANSWERS: FINE, probe.HANGS: SKIP, probe.REFUSES: LACK}[state], reason


@functools.cache
def perf_verdict() -> tuple[str, str]:
    if shutil.which("perf") is None:
        return LACK, "perf is not installed"
    command = ["perf", "record", "-q", "-e", "cpu-clock", "-o", "/dev/null", "--", "true"]
    done = procs.run(command, 30, status=None)
    if done.status:
        return LACK, f"perf record -e cpu-clock fails: {' '.join(done.err.split())[:200]}"
    return FINE, ""


@functools.cache
def perf_python_verdict() -> tuple[str, str]:
    # Older perfs answer through "version", newer ones through "check feature" as well.
    options = procs.run(["perf", "version", "--build-options"], 30, status=None).out
    lines = [line for line in options.splitlines() if "libpython" in line]
    if not any("on" in line.split("#")[0].replace("libpython", "") for line in lines):
        return LACK, "this perf was built without libpython"
    return FINE, ""


def strict() -> bool:
    """Whether a missing prerequisite is a failure."""
    asked = os.environ.get("KSYM_RUN_KERNEL_TESTS")
    return asked == "1" or (asked is None and os.environ.get("CI", "") in ("true", "1"))


def _stop(verdict: str, reason: str) -> NoReturn:
    if reason not in _said:
        _said.append(reason)
    if verdict == SKIP or not strict():
        pytest.skip(reason)
    pytest.fail(f"missing prerequisite: {reason}", pytrace=False)


def _require(verdict: str, reason: str) -> None:
    if verdict != FINE:
        _stop(verdict, reason)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # With importlib's import mode this hook may be asked about other folders' tests too.
    if os.path.dirname(os.path.abspath(__file__)) in str(item.path):
        _require(*kernel_verdict())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _said:
        return
    terminalreporter.section("live tests")
    word = "FAILED" if strict() else "SKIPPED"
    for reason in _said:
        hang = reason.startswith(probe.HANG_REASON.split("{")[0])
        terminalreporter.write_line(f"{'SKIPPED' if hang else word}: {reason}")


@pytest.fixture(scope="session")
def compiler() -> None:
    """There is a gcc."""
    if shutil.which("gcc") is None:
        _stop(LACK, "gcc is not installed")


@pytest.fixture(scope="session")
def newer_pythons() -> list[str]:
    """Pythons that have -X perf, from 3.12 on, one of each version; two on CI."""
    found = list(filter(None, map(_python, ("3.12", "3.13", "3.14"))))
    if not found or (strict() and len(found) < 2):
        _stop(LACK, "there are not two Pythons from 3.12 on")
    return found


def _python(version: str) -> str | None:
    """The first Python of that version that runs: pyenv's shims are there without being so."""
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    check = f"import sys; assert '%d.%d' % sys.version_info[:2] == '{version}'"
    for path in (
        shutil.which(f"python{version}"),
        *glob.glob(f"{root}/versions/{version}*/bin/python"),
    ):
        if path is not None and not procs.run([path, "-c", check], 30, status=None).status:
            return path
    return None


@pytest.fixture(scope="session")
def perf() -> None:
    """perf is there and can sample cpu-clock."""
    _require(*perf_verdict())


@pytest.fixture(scope="session")
def perf_python(perf: None) -> None:
    """perf can run Python scripts."""
    _require(*perf_python_verdict())

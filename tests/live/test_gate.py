"""When live tests run, skip or fail, seen from outside: a pytest of its own each time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.oracle import procs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

ONE = "tests/live/test_oracle.py::test_scorer_counts_right_wrong_and_missing"
HANG = """\
from tests.oracle import probe
probe.ask = lambda: (probe.HANGS, probe.HANG_REASON.format(15))
"""
REFUSAL = """\
from tests.oracle import probe
probe.ask = lambda: (probe.REFUSES, "bpf(2) cannot be used: Operation not permitted")
"""
NOBODY = "import os\nos.geteuid = lambda: 1000\n"


def outcome(directory: Path, world: str, ci: str, asked: str | None) -> tuple[int, str]:
    """Exit status and output of one live test in a world that a plugin makes up."""
    (directory / "made_up_world.py").write_text(world)
    env = {**procs.environment(), "CI": ci}
    env["PYTHONPATH"] += f":{directory}"
    env.pop("KSYM_RUN_KERNEL_TESTS", None)
    if asked is not None:
        env["KSYM_RUN_KERNEL_TESTS"] = asked
    plugins = ["-p", "made_up_world", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins]
    done = subprocess.run(
        [*command, ONE],
        check=False,
        env=env,
        cwd=procs.REPO,
        capture_output=True,
        text=True,
        timeout=120 * procs.PATIENCE,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ci, asked", [("true", None), ("", "1"), ("", None)])
def test_a_hanging_bpf_is_a_skip_even_on_ci(tmp_path: Path, ci: str, asked: str | None) -> None:
    status, out = outcome(tmp_path, HANG, ci, asked)
    assert status == 0
    assert "SKIPPED: bpf(2) hangs on this host" in out
    assert "1 skipped" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, reason", [(NOBODY, "live tests need root"), (REFUSAL, "bpf(2) cannot be used")]
)
@pytest.mark.parametrize("ci, asked", [("true", None), ("", "1")])
def test_anything_else_that_is_missing_fails_on_ci(
    tmp_path: Path, world: str, reason: str, ci: str, asked: str | None
) -> None:
    status, out = outcome(tmp_path, world, ci, asked)
    assert status == 1
    assert f"FAILED: {reason}" in out


def test_an_ordinary_user_skips_elsewhere(tmp_path: Path) -> None:
    status, out = outcome(tmp_path, NOBODY, "", None)
    assert status == 0
    assert "SKIPPED: live tests need root" in out


@pytest.mark.slow
def test_live_tests_can_be_turned_off_on_ci_too(tmp_path: Path) -> None:
    status, out = outcome(tmp_path, "", "true", "0")
    assert status == 0
    assert "SKIPPED: KSYM_RUN_KERNEL_TESTS=0" in out

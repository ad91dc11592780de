"""What ``ksym pyspy record`` does with a py-spy that fails: perf and py-spy are stand-ins."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ksym_plugin.cli import pyspy_record
from tests.unit.cli.test_cli import ksym

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Answers on the fifo, as perf does, and waits.
PERF = """#!/bin/sh
echo $$ >"$0.pid"
for argument; do
    case $argument in --control=*) printf ack >"${argument##*,}" ;; esac
done
exec sleep 100
"""
#: Deaf to Ctrl-C, as a program that is stuck in a system call.
PY_SPY = """#!/bin/sh
trap '' INT
echo $$ >"$0.pid"
echo 'Sampling process 100 times a second'
for _ in 0 1 2 3; do for _ in 0 1 2 3 4 5 6 7 8 9; do echo '{failed}'; done; done
{then}
exec sleep 100
"""
FAILED = "[WARN remoteprocess::linux] Failed to suspend process"

if TYPE_CHECKING:
    StandIn = Callable[[str], None]


@pytest.fixture
def target() -> Iterator[int]:
    call = [sys.executable, "-c", "input()"]
    with subprocess.Popen(call, stdin=subprocess.PIPE) as child:
        yield child.pid
        child.kill()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Puts a py-spy that ``then`` does so in front of the real one; both leave their ids."""

    def install(then: str) -> None:
        scripts = {"perf": PERF, "py-spy": PY_SPY.format(failed=FAILED, then=then)}
        for name, text in scripts.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return install


def record(tmp_path: Path, *arguments: str) -> str:
    """The messages of a recording that fails."""
    call = ["pyspy", "record", "-H", "none.db", "-o", str(tmp_path / "out.json"), *arguments]
    done = ksym(*call)
    assert done.exit_code == 1, done.output
    return done.stderr


def test_a_py_spy_that_only_fails_is_ended(
    stand_in: StandIn, target: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyspy_record, "_STUCK_SECONDS", 0.1)
    stand_in("")
    # Far longer than the test may take: only the watchdog ends this.
    messages = record(tmp_path, "-p", str(target), "--duration", "100000")
    assert "py-spy can no longer stop the process" in messages
    assert "py-spy wrote nothing" in messages
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "py-spy.pid").read_text()), 0)


def test_a_py_spy_that_recovers_is_not(stand_in: StandIn, target: int, tmp_path: Path) -> None:
    stand_in("echo 'attached to thread'; trap - INT")
    messages = record(tmp_path, "-p", str(target), "--duration", "0.3")
    assert "py-spy can no longer" not in messages
    assert "py-spy wrote nothing" in messages


def test_a_command_that_cannot_be_sampled_goes_on_to_its_end(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("")
    (tmp_path / "py-spy").write_text("#!/bin/sh\necho 'Error: not today'\n", encoding="utf-8")
    monkeypatch.setattr(pyspy_record, "_PYTHON_SECONDS", 0)
    done = tmp_path / "done"
    # It outlives perf, which is ended once sampling has failed.
    script = f"while kill -0 $(cat {tmp_path}/perf.pid); do sleep 0.02; done; echo over >{done}"
    messages = record(tmp_path, "--", "sh", "-c", script)
    assert "not today" in messages
    assert "sh goes on" in messages
    assert done.read_text() == "over\n"

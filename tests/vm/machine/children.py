"""Programs started on the way, none of which outlives this process, however it ends."""

from __future__ import annotations

import shlex
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_running: set[subprocess.Popen[bytes]] = set()


class Failed(Exception):
    """A program that the machinery needs did not do its work."""


def start(
    command: Sequence[str],
    *,
    fds: Sequence[int] = (),
    out: int | None = None,
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start it so that the kernel kills it when the thread that called this is gone."""
    child = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "--", *command],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT if out == subprocess.PIPE else None,
        cwd=cwd,
    )
    _running.add(child)
    return child


def end(child: subprocess.Popen[bytes]) -> int:
    """Wait for it, and forget it."""
    status = child.wait()
    _running.discard(child)
    return status


def run(
    command: Sequence[str],
    *,
    fds: Sequence[int] = (),
    fine: Sequence[int] = (0,),
    cwd: str | None = None,
) -> str:
    """Run it to its end; its output, or Failed with it."""
    child = start(command, fds=fds, out=subprocess.PIPE, cwd=cwd)
    assert child.stdout is not None
    with child.stdout:
        output = child.stdout.read().decode(errors="replace")
    status = end(child)
    if status not in fine:
        raise Failed(f"status {status}: {shlex.join(command)}\n{output[-2000:].rstrip()}")
    return output


def kill_all() -> None:
    for child in list(_running):
        child.kill()

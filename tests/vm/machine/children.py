"""Programs started on the way, none of which outlives this process, however it ends."""

from __future__ import annotations

import shlex
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_running: set[subprocess.Popen[bytes]] = set()
_stopped = False


class Failed(Exception):
    """A program that the machinery needs did not do its work."""


def start(
    command: Sequence[str], *, fds: Sequence[int] = (), cwd: str | None = None
) -> subprocess.Popen[bytes]:
    """Start it with its output in a pipe; the kernel kills it if the calling thread dies."""
    if _stopped:
        raise Failed("stopped")
    child = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "--", *command],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
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
    child = start(command, fds=fds, cwd=cwd)
    assert child.stdout is not None
    with child.stdout:
        try:
            output = child.stdout.read().decode(errors="replace")
        except BaseException:
            child.kill()
            child.stdout.read()  # ends when all that it started has ended as well
            raise
        finally:
            status = end(child)
    if status not in fine:
        raise Failed(f"status {status}: {shlex.join(command)}\n{output[-2000:].rstrip()}")
    return output


def stop() -> None:
    """Kill all there are and start no more: whoever waits for one gets Failed."""
    global _stopped
    _stopped = True
    for child in list(_running):
        child.kill()

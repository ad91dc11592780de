"""Children with a time limit, ended with their whole process group, abandoned if they hang."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

#: Limits are for what hangs, not for what is slow: a machine that others keep busy gets so many
#: times what a quiet one needs.
PATIENCE = 6

#: A child stuck in the kernel cannot be reaped; keeping it here keeps its finaliser quiet.
_abandoned: list[subprocess.Popen[bytes]] = []


class Failed(Exception):
    """A child ended with a status other than the one wanted, or not in time."""


class Done:
    __slots__ = ("err", "out", "status")

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.out = out
        self.err = err


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of children that import ``tests.oracle`` from the checkout."""
    return {**os.environ, "PYTHONPATH": REPO, "LC_ALL": "C.UTF-8", **(extra or {})}


def start(
    command: Sequence[str],
    *,
    fds: Sequence[int] = (),
    own_group: bool = True,
    env: Mapping[str, str] | None = None,
    out: int | None = None,
    err: int | None = None,
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(command),
        pass_fds=fds,
        start_new_session=own_group,
        env=environment(env),
        cwd=REPO,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
    )


def run(
    command: Sequence[str],
    seconds: float,
    *,
    env: Mapping[str, str] | None = None,
    status: int | None = 0,
) -> Done:
    """Run to the end, output and all; Failed when late or when the status is another one.

    ``seconds`` are those of a quiet machine.
    """
    child = start(command, env=env, out=subprocess.PIPE, err=subprocess.PIPE)
    try:
        out, err = child.communicate(timeout=seconds * PATIENCE)
    except subprocess.TimeoutExpired:
        end_group(child)
        late = f"not done after {seconds * PATIENCE:g} s: {' '.join(command)}"
        raise Failed(late) from None
    except BaseException:
        end_group(child)
        raise
    done = Done(child.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
    if status is not None and done.status != status:
        raise Failed(f"status {done.status}: {' '.join(command)}\n{done.err[-4000:]}")
    return done


def end(child: subprocess.Popen[bytes], seconds: float = 5.0) -> bool:
    """Kill one child; False if it hangs in the kernel, which is then left behind."""
    if child.poll() is None:
        child.kill()
    return _reap(child, seconds)


def end_group(child: subprocess.Popen[bytes], seconds: float = 5.0) -> bool:
    """Kill the process group that ``child`` leads (it was started with ``own_group``)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return _reap(child, seconds)


def _reap(child: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        _abandoned.append(child)
        return False
    finally:
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()
    return True


def read_line(fd: int, seconds: float) -> bytes:
    """One line from a pipe, or what there was at its end; Failed when it does not come."""
    deadline = time.monotonic() + seconds
    poller = select.poll()  # select(2) knows no descriptor above 1023
    poller.register(fd, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            raise Failed(f"no answer within {seconds:g} s")
        byte = os.read(fd, 1)
        if not byte:
            break
        line += byte
    return line

"""A file descriptor that becomes readable again and again: timerfd(2)."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Ticker:
    """Makes ``fd`` readable every ``seconds``, until it is cleared."""

    __slots__ = ("_due", "_seconds", "fd")

    def __init__(self, seconds: float) -> None:
        """OSError where there is no timerfd, or no descriptor left for it."""
        # os.timerfd_create() is Python 3.13's.
        import ctypes

        self._seconds = seconds
        self._due = time.monotonic() + seconds
        libc: Any = ctypes.CDLL(None, use_errno=True)
        self.fd: int = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        # struct itimerspec: interval and first expiry, each in seconds and ns
        parts = (int(seconds), int(seconds % 1 * 1e9)) * 2
        spec = (ctypes.c_long * 4)(*parts)
        if self.fd < 0 or libc.timerfd_settime(self.fd, 0, spec, None) < 0:
            error = ctypes.get_errno()
            self.close()
            raise OSError(error, os.strerror(error))

    def clear(self) -> bool:
        """Make ``fd`` unreadable until the next tick; whether there was one."""
        now = time.monotonic()
        if now < self._due:
            # A read that fails would cost a tenth of what following a change does.
            return False
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return False
        self._due += self._seconds * (1 + (now - self._due) // self._seconds)
        return True

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

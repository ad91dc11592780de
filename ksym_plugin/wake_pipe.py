"""Wakes a thread that polls; and tells whether descriptors are still our own.

A host may close all descriptors, as daemons do, and their numbers may be other files' soon
after. What is written or closed by number then would be theirs.
"""

from __future__ import annotations

import contextlib
import os


class Pipe:
    """Wakes who polls ``read_fd``; knows whether its descriptors are still its own."""

    __slots__ = ("_identity", "_write_fd", "read_fd")

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._identity = _identity(self.read_fd)

    def is_ours(self) -> bool:
        """Whether nobody has closed them: their numbers may be another file's by now."""
        return self.read_fd >= 0 and self._identity == _identity(self.read_fd)

    def wake(self) -> None:
        if self.read_fd >= 0 and self._identity == _identity(self._write_fd):
            with contextlib.suppress(OSError):
                os.write(self._write_fd, b".")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            os.read(self.read_fd, 4096)

    def close(self) -> None:
        """Idempotent."""
        if self.read_fd >= 0:
            read_fd, self.read_fd = self.read_fd, -1
            os.close(read_fd)
            os.close(self._write_fd)


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino

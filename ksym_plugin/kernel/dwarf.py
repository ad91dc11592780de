"""Source lines of a kernel from its DWARF, read by addr2line.

LLVM's is preferred: of a stock kernel it needs half the memory and a third of the time of
binutils' (see docs/benchmarks.md), which also mistakes the file of some lines.
"""

from __future__ import annotations

import os
import signal
import socket
import time

from ksym_plugin.kernel.elf import TOP, ElfError
from ksym_plugin.kernel.worker import has_ended, start_program
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.symbols import SourceLocation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PROGRAMS = ("llvm-addr2line", "addr2line")
#: The first answer takes reading the whole DWARF of a kernel.
_SECONDS = 120.0
#: RLIMIT_DATA: all but the file, which LLVM's maps. binutils' takes 1.1 GB for a stock 6.12.
_MOST_MEMORY = 2 << 30
#: PATH_MAX is 4096; of a damaged file a name may be as long as the file.
_LONGEST_ANSWER = 1 << 16
_CHUNK = 1 << 16
#: One that hangs in the kernel is left behind.
_KILL_SECONDS = 3.0


class ImageLines:
    """The source lines of a running kernel's image; close it in the end."""

    def __init__(self, path: str, offset: int, tell: Callable[[str], None] | None = None) -> None:
        """``offset`` is how far above its linked addresses the image runs.

        After a failure there are no more lines: ``tell`` is given a sentence, or without it
        KsymError is raised where there is no addr2line, ElfError where it ends.
        """
        self._path = path
        self._offset = offset
        self._tell = tell
        self._has_failed = False
        self._program: _Addr2line | None = None
        self._known: dict[int, SourceLocation | None] = {}

    def line(self, address: int, /) -> SourceLocation | None:
        """The line of the instruction at an address in the kernel's memory."""
        if address not in self._known:
            self._known[address] = self._find(address - self._offset)
        return self._known[address]

    def close(self) -> None:
        """End the program."""
        if self._program is not None:
            self._program.close()
            self._program = None

    def _find(self, linked: int) -> SourceLocation | None:
        if self._has_failed or not 0 <= linked <= TOP:
            return None
        try:
            self._program = self._program or _Addr2line(self._path)
            return self._program.ask(linked)
        except KsymError as error:
            self._has_failed = True
            self.close()
            if self._tell is None:
                raise
            self._tell(f"no more source lines of the kernel: {error}")
            return None


def _line(answer: str) -> SourceLocation | None:
    """``FILE:LINE``, behind which a discriminator may stand; ValueError for anything else."""
    file, _, number = answer.partition(" (discriminator ")[0].rpartition(":")
    if not file:
        raise ValueError(answer)
    # Where no line is known, LLVM's prints line 0 and binutils' a question mark.
    if number in ("?", "0"):
        return None
    return SourceLocation(os.path.normpath(file), int(number))


class _Addr2line:
    """An addr2line that waits for addresses, one at a time. It ends with this process."""

    def __init__(self, path: str) -> None:
        import shutil
        import subprocess

        program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
        if program is None:
            raise KsymError("lines of kernel functions need addr2line", "install binutils")
        # Servers are asked by this program alone, and only when that is wanted.
        environment = {key: os.environ[key] for key in os.environ if key != "DEBUGINFOD_URLS"}
        self._name = os.path.basename(program)
        self._path = path
        # No pipe: writing to one whose reader has ended raises SIGPIPE, which ends perf.
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = start_program(
                    [program, "-a", "-e", os.path.abspath(path)],
                    signal.SIGKILL,
                    _MOST_MEMORY,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    env={**environment, "LC_ALL": "C"},
                )
            except (OSError, subprocess.SubprocessError) as error:
                self._socket.close()
                raise KsymError(f"{program} cannot be run ({error})", "install binutils") from None

    def ask(self, address: int) -> SourceLocation | None:
        """The line of an address. ElfError for no answer, or for nonsense."""
        try:
            return _line(self._answer(address))
        except (OSError, ValueError, EOFError) as error:
            # Which is TimeoutError from Python 3.10 on.
            is_late = isinstance(error, socket.timeout)
            problem = "takes too long" if is_late else "gives no answer"
            raise ElfError(
                f"{self._name} {problem} about {self._path}, which may be damaged",
                "name another vmlinux of that build",
            ) from None

    def _answer(self, address: int) -> str:
        give_up = time.monotonic() + _SECONDS
        self._socket.settimeout(_SECONDS)
        self._socket.sendall(b"%#x\n" % address, socket.MSG_NOSIGNAL)
        answer = b""
        while answer.count(b"\n") < 2:
            self._socket.settimeout(max(give_up - time.monotonic(), 0.001))
            piece = self._socket.recv(_CHUNK)
            if not piece or len(answer) > _LONGEST_ANSWER:
                raise EOFError
            answer += piece
        echo, location, rest = answer.split(b"\n", 2)
        if int(echo, 16) != address or rest:
            raise ValueError(answer)
        return location.decode("utf-8", "backslashreplace")

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        has_ended(self._process, _KILL_SECONDS)

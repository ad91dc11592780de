"""What programs are, and their source lines, from a process that reads them in time."""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import sys
import time

from ksym_plugin.timeline.program import GONE, LENGTH, ProgramDetails

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

#: How long the rest may take at the end, in seconds.
_LAST_WAIT: Final = 2.0
#: How long to wait for the process to listen: an interpreter starts in a tenth of that.
_FIRST_WAIT: Final = 1.0
_SHUT_WR: Final = 1
_CHUNK: Final = 1 << 16
#: Under -I, which keeps the working directory's modules out: root may record anywhere.
_CHILD: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    " from ksym_plugin.sources import details_child; details_child.main(int(sys.argv[2]))"
)


class DetailsProcess:
    """Starts the process, and has what it sends; see ``details_child``.

    ``counts`` has how many programs were told of, by ``ProgramDetails.problem``. ``notes``
    says why nothing more will come, if so.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.notes: list[str] = []
        self._data = b""
        self._cpu = 0.0
        self._listens = self._is_done = False
        self._early: list[ProgramDetails] = []
        # Here, so that who never records does not pay for them.
        import socket
        import subprocess

        self._late = subprocess.TimeoutExpired
        self._pipe, theirs = socket.socketpair()
        folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _CHILD, folder, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except BaseException:
            self._pipe.close()
            raise
        self._pipe.setblocking(False)

    def fileno(self) -> int:
        """Readable when something has come; -1 when nothing will any more."""
        return self._pipe.fileno()

    def wait(self, seconds: float = _FIRST_WAIT) -> None:
        """Until no new program is missed any more; not longer than that, come what may."""
        give_up = time.monotonic() + seconds
        early: list[ProgramDetails] = []
        while not self._listens and self._pipe.fileno() >= 0:
            left = give_up - time.monotonic()
            if left <= 0 or not select.select([self._pipe], [], [], left)[0]:
                break
            early += self.read()
        self._early = early

    def read(self) -> list[ProgramDetails]:
        """What has come since the last call; never waits."""
        while self._pipe.fileno() >= 0:
            try:
                data = self._pipe.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self._pipe.close()
                break
            self._data += data
        early, self._early = self._early, []
        return early + self._messages()

    def finish(self) -> list[ProgramDetails]:
        """What the process still has, which then ends."""
        with contextlib.suppress(OSError):
            self._pipe.shutdown(_SHUT_WR)
        give_up = time.monotonic() + _LAST_WAIT
        rest: list[ProgramDetails] = []
        while self._pipe.fileno() >= 0 and time.monotonic() < give_up:
            select.select([self._pipe], [], [], 0.1)
            rest += self.read()
        self.close()
        if not self._is_done and not self.notes:
            self.notes.append("source lines are missing: who reads them has ended early, or hangs")
        return rest

    def summary(self) -> str:
        """Of how many programs the lines were read, and what that has cost, in a sentence."""
        there, gone = self.counts.get("", 0), self.counts.get(GONE, 0)
        text = f"source lines of {there} of {there + gone} programs"
        if there + gone:
            text += f" ({100 * there / (there + gone):.1f} %)"
        others = [
            f"{count} have none ({problem})"
            for problem, count in self.counts.items()
            if problem not in ("", GONE)
        ]
        return "; ".join((text, *others, f"{self._cpu:.2f} s of CPU to read them"))

    def close(self) -> None:
        """End the process; idempotent."""
        self._pipe.close()
        if self._process.poll() is None:
            self._process.kill()
        # It may hang in the kernel, which is no reason for the recorder to do so.
        with contextlib.suppress(self._late):
            self._process.wait(_LAST_WAIT)

    def _messages(self) -> list[ProgramDetails]:
        found: list[ProgramDetails] = []
        at = 0
        while len(self._data) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data, at)
            end = at + LENGTH.size + length
            if end > len(self._data):
                break
            message = marshal.loads(self._data[at + LENGTH.size : end])  # noqa: S302 - our own
            at = end
            if message is True:
                self._listens = True
            elif isinstance(message, list):
                found.append(self._details(message))
            elif isinstance(message, str):
                self.notes.append(f"there will be no source lines of BPF programs: {message}")
            else:
                # The last thing it says.
                self._cpu, self._is_done = message, True
        self._data = self._data[at:]
        return found

    def _details(self, fields: list[Any]) -> ProgramDetails:
        details = ProgramDetails(0, "")
        for field, value in zip(ProgramDetails.__slots__, fields):
            setattr(details, field, value)
        self.counts[details.problem] = self.counts.get(details.problem, 0) + 1
        return details

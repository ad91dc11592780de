"""Asks what functions are in modules, of a process that is started for it."""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Final

    from ksym_plugin.sources.module_child import Answer, Question

#: How long the process may take, in ns, init functions that it waits for included.
_PATIENCE: Final = 10_000_000_000
#: How long it may take to end, in seconds.
_LAST_WAIT: Final = 0.5
_CHUNK: Final = 1 << 16
#: Under -I, which keeps the working directory's modules out: root may record anywhere.
_CHILD: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    " from ksym_plugin.sources import module_child; module_child.main()"
)


class ModuleReader:
    """One process at a time; see ``module_child``. ``fd`` is readable when it has answered."""

    def __init__(self) -> None:
        self.fd = -1
        self._data = b""
        self._give_up = 0
        self._late: type[Exception] = OSError
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, questions: list[Question]) -> None:
        """Start the process. OSError if that cannot be."""
        import subprocess

        self._late = subprocess.TimeoutExpired
        folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        reading, writing = os.pipe()
        try:
            question = os.memfd_create("modules", os.MFD_CLOEXEC)
            try:
                os.write(question, marshal.dumps(questions))
                os.lseek(question, 0, os.SEEK_SET)
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _CHILD, folder],
                    stdin=question,
                    stdout=writing,
                    start_new_session=True,
                )
            finally:
                os.close(question)
                os.close(writing)
        except BaseException:
            os.close(reading)
            raise
        os.set_blocking(reading, False)
        self.fd, self._data = reading, b""
        self._give_up = time.monotonic_ns() + _PATIENCE

    def read(self) -> list[Answer] | None:
        """The answers once they are there; an empty list if there will be none."""
        while True:
            try:
                data = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                if time.monotonic_ns() < self._give_up:
                    return None
                data = self._data = b""
            if not data:
                break
            self._data += data
        self.close()
        try:
            answers = marshal.loads(self._data)  # noqa: S302 - our own
        except (EOFError, ValueError, TypeError):
            return []
        # What else wrote to its stdout may have made anything of them.
        return answers if isinstance(answers, list) else []

    def close(self) -> None:
        """End the process; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._process is not None:
            # It has answered, or never will; what it runs to unpack a file goes with it. If
            # it hangs in the kernel nobody can wait for it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(self._late):
                self._process.wait(_LAST_WAIT)
            self._process = None

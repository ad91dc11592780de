"""What programs are, and their source lines, from a process that reads them in time.

It is one of its own so that neither it nor the recorder makes the other late. It listens to the
kernel's load records, takes a descriptor of every new program at once, which keeps the program
from going, and closes it as soon as it has been read: after some 0.1 ms, with at most 64 open at
a time. A program that is unloaded meanwhile goes by so much later, and its unload record names
this process.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque

from ksym_plugin.kernel import syscalls
from ksym_plugin.kernel.bpf_prog import ProgramReader, open_program
from ksym_plugin.kernel.perf_ring import PROG_LOAD, BpfEvent, PerCpuRings, Ring, parse
from ksym_plugin.kernel.worker import Worker, run_promptly
from ksym_plugin.timeline.program import GONE, ProgramDetails

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.kernel.worker import Connection

#: How long the rest may take at the end, in seconds.
_LAST_WAIT = 2.0
#: How long to wait for the process to listen: an interpreter starts in a tenth of that.
_FIRST_WAIT = 1.0
#: What the process sends first, once it misses no new program. ProgramDetails follow, and at
#: last how many seconds of CPU it has taken.
LISTENING = "listening"
_MOST_OPEN = 64
_RING_BYTES = 64 * 1024
_TICK_MS = 1000
#: How often ids are looked through where the kernel does not announce programs.
_POLL_MS = 50
#: With so many bytes waiting for the recorder, programs that were there before wait too.
_MOST_UNSENT = 1 << 20
_FLAGS = syscalls.BPF_EVENT | syscalls.WATERMARK


class DetailsProcess:
    """Starts the process, and takes what it sends.

    ``counts`` has how many programs were reported, by ``ProgramDetails.problem``. ``notes``
    says why nothing more will come, if so. OSError if the process cannot be started.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.notes: list[str] = []
        self._cpu: float | None = None
        self._worker = Worker(watch)

    def fileno(self) -> int:
        """Readable when something has come; -1 when nothing will any more."""
        return self._worker.fileno()

    def wait(self, seconds: float = _FIRST_WAIT) -> None:
        """Wait until no new program is missed any more, ``seconds`` at most."""
        self._worker.wait(seconds)

    def read(self) -> list[ProgramDetails]:
        """What has come since the last call; never waits."""
        found: list[ProgramDetails] = []
        for message in self._worker.read():
            if isinstance(message, ProgramDetails):
                self.counts[message.problem] = self.counts.get(message.problem, 0) + 1
                found.append(message)
            elif isinstance(message, float):
                self._cpu = message
            elif message != LISTENING:
                self.notes.append(f"there will be no source lines of BPF programs: {message}")
        return found

    def finish(self) -> list[ProgramDetails]:
        """What the process still has; then it ends."""
        self._worker.finish()
        give_up = time.monotonic() + _LAST_WAIT
        rest: list[ProgramDetails] = []
        while self.fileno() >= 0 and time.monotonic() < give_up:
            self._worker.wait(0.1)
            rest += self.read()
        self.close()
        if self._cpu is None and not self.notes:
            self.notes.append("source lines are missing: who reads them has ended early, or hangs")
        return rest

    def summary(self) -> str:
        """A sentence: of how many programs the lines were read, and the CPU time that took."""
        there, gone = self.counts.get("", 0), self.counts.get(GONE, 0)
        text = f"source lines of {there} of {there + gone} programs"
        if there + gone:
            text += f" ({100 * there / (there + gone):.1f} %)"
        others = [
            f"{count} have none ({problem})"
            for problem, count in self.counts.items()
            if problem not in ("", GONE)
        ]
        return "; ".join((text, *others, f"{self._cpu or 0:.2f} s of CPU to read them"))

    def close(self) -> None:
        """End the process; idempotent."""
        self._worker.close()


def watch(recorder: Connection) -> None:
    """What the process does: send ProgramDetails until no more are asked for."""
    Watch(recorder).run()


class Watch:
    """New programs, by the kernel's records or else by their ids; older ones in between."""

    def __init__(self, recorder: Connection) -> None:
        self._recorder = recorder
        self._reader = ProgramReader()
        self._poller = select.poll()
        self._poller.register(recorder, select.POLLIN)
        self._rings = PerCpuRings()
        self._fresh: deque[int] = deque()
        self._follow_cpus()
        self._backlog = deque(self._reader.ids())
        self._last_id = max(self._backlog, default=0)

    def run(self) -> None:
        """Send programs until the recorder asks for the rest."""
        self._post(LISTENING)
        is_prompt = False
        while not self._is_over():
            if not self._backlog and not is_prompt:
                # Not before: what was there already has time, and is much work.
                is_prompt = True
                run_promptly()
            self._look()
            if self._recorder.unsent:
                self._post()
            if self._fresh:
                self._take_fresh()
            elif self._backlog and len(self._recorder.unsent) < _MOST_UNSENT:
                self._post(self._reader.details(self._backlog.popleft()))
        self._look()
        while self._fresh:
            self._take_fresh()
        self._recorder.send(time.process_time())

    def _is_over(self) -> bool:
        has_room = len(self._recorder.unsent) < _MOST_UNSENT
        busy = self._fresh or (self._backlog and has_room)
        ready = self._poller.poll(0 if busy else _TICK_MS if self._rings.by_cpu else _POLL_MS)
        if not ready and not busy:
            self._follow_cpus()
        return any(fd == self._recorder.fileno() and event & ~select.POLLOUT for fd, event in ready)

    def _post(self, *messages: object) -> None:
        """Send what can be sent now: a busy recorder must not keep a program from being read."""
        self._recorder.post(*messages)
        room = select.POLLOUT if self._recorder.unsent else 0
        self._poller.modify(self._recorder, select.POLLIN | room)

    def _look(self) -> None:
        """Note which programs are new."""
        lost = not self._rings.by_cpu
        for ring in self._rings.by_cpu.values():
            data, tight = ring.drain()
            records, whole = parse(data)
            lost = lost or tight or not whole
            for record in records:
                if isinstance(record, BpfEvent) and record.type == PROG_LOAD:
                    self._fresh.append(record.id)
                    self._last_id = max(self._last_id, record.id)
        if lost:
            for prog_id in self._reader.ids(self._last_id):
                self._fresh.append(prog_id)
                self._last_id = prog_id

    def _take_fresh(self) -> None:
        """Open new programs, as many as may be open, then read and close them one by one.

        An error ends this process, and with it what is still open.
        """
        fresh = [self._fresh.popleft() for _ in range(min(len(self._fresh), _MOST_OPEN))]
        opened = [(prog_id, open_program(prog_id)) for prog_id in fresh]
        for prog_id, fd in opened:
            details = self._reader.details(prog_id, fd)
            if fd >= 0:
                os.close(fd)
            self._post(details)

    def _follow_cpus(self) -> None:
        """Listen on CPUs that came; on none where perf events are not allowed."""
        gone, came = self._rings.look()
        for ring in gone:
            self._poller.unregister(ring.fd)
            ring.close()
        # Without sample_id_all, which would harm older listeners: see ``perf_event``.
        attr = syscalls.perf_event_attr(flags=_FLAGS, wakeup_watermark=1)
        for cpu in came:
            with contextlib.suppress(OSError):
                fd = syscalls.perf_event_open(attr, -1, cpu)
                self._rings.by_cpu[cpu] = Ring(fd, _RING_BYTES)
                self._poller.register(fd, select.POLLIN)

"""The process that reads each new program's lines while the program is still there.

It is one of its own so that neither the recorder's work keeps it from being in time, nor
its work a name from being recorded. It listens to the kernel's load records itself, takes
a descriptor of every new program at once, which keeps the program from going, and lets
go as soon as it has been read: after some 0.1 ms, and never with more than MOST_HELD at
a time. A program that is unloaded meanwhile goes by so much later, and its unload record
names this process.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import socket
import time
from collections import deque

from ksym_plugin.kernel import bpf_prog, syscalls
from ksym_plugin.kernel.bpf_lines import Reader, open_program
from ksym_plugin.kernel.perf_ring import (
    PROG_LOAD,
    BpfEvent,
    Ring,
    online_text,
    parse,
    parse_cpu_list,
)
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.program import GONE, LENGTH, ProgramDetails

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

MOST_HELD: Final = 64
_RING_BYTES: Final = 64 * 1024
_TICK_MS: Final = 1000
#: How often ids are looked through where the kernel does not announce programs.
_POLL_MS: Final = 50
_LOWEST_REALTIME: Final = 1
#: With so many bytes waiting for the recorder, programs that were there before wait too.
_MOST_UNSENT: Final = 1 << 20
_FLAGS: Final = syscalls.BPF_EVENT | syscalls.WATERMARK


def main(fd: int) -> None:
    """Send ProgramDetails over the socket ``fd`` until its other end is shut down."""
    # Who records may have been started from a terminal, and is who gets its signals.
    with socket.socket(fileno=fd) as pipe, contextlib.suppress(BrokenPipeError, ConnectionError):
        try:
            Watch(pipe).run()
        except (SourceError, OSError) as error:
            pipe.setblocking(True)
            pipe.sendall(message(str(error)))


def message(content: str | float | list[Any]) -> bytes:
    """What is known of a program, as ProgramDetails has it; why there will be nothing; True
    at the beginning; or, at the end, how many seconds of CPU it has taken."""
    data = marshal.dumps(content)
    return LENGTH.pack(len(data)) + data


class Watch:
    """New programs from the kernel's records, then from the ids; the old ones between."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        # A recorder that is busy must not keep the next program from being read.
        self._pipe.setblocking(False)
        self._unsent = bytearray()
        self._reader = Reader()
        self._poller = select.poll()
        self._poller.register(pipe, select.POLLIN)
        self._rings: dict[int, Ring] = {}
        self._online = ""
        self._fresh: deque[int] = deque()
        self._follow_cpus()
        self._backlog = deque(bpf_prog.program_ids())
        self._last_id = max(self._backlog, default=0)

    def run(self) -> None:
        """Until the other end asks for the rest."""
        self._send(message(True))
        prompt = False
        while not self._is_over():
            if not self._backlog and not prompt:
                # Not before: what was there already has time, and is much work.
                prompt = True
                _be_prompt()
            self._look()
            if self._unsent:
                self._send(b"")
            if self._fresh:
                self._take_fresh()
            elif self._backlog and len(self._unsent) < _MOST_UNSENT:
                self._tell(self._backlog.popleft(), -1)
        self._look()
        while self._fresh:
            self._take_fresh()
        self._unsent += message(time.process_time())
        self._pipe.setblocking(True)
        self._pipe.sendall(self._unsent)

    def _is_over(self) -> bool:
        busy = self._fresh or (self._backlog and len(self._unsent) < _MOST_UNSENT)
        ready = self._poller.poll(0 if busy else _TICK_MS if self._rings else _POLL_MS)
        if not ready and not busy:
            self._follow_cpus()
        return any(fd == self._pipe.fileno() and event & ~select.POLLOUT for fd, event in ready)

    def _send(self, data: bytes) -> None:
        """Send what can be sent now; the rest when there is room for it."""
        self._unsent += data
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._pipe.send(self._unsent)]
        self._poller.modify(self._pipe, select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def _look(self) -> None:
        """Note which programs are new."""
        lost = not self._rings
        for ring in self._rings.values():
            head = ring.head()
            time.monotonic_ns()  # The barrier that Ring.take asks for.
            if not ring.waiting(head):
                continue
            data, tight = ring.take(head)
            records, whole = parse(data)
            lost = lost or tight or not whole
            for record in records:
                if isinstance(record, BpfEvent) and record.type == PROG_LOAD:
                    self._fresh.append(record.id)
                    self._last_id = max(self._last_id, record.id)
        if lost:
            for prog_id in bpf_prog.program_ids(self._last_id):
                self._fresh.append(prog_id)
                self._last_id = prog_id

    def _take_fresh(self) -> None:
        """Hold what is new, as much as may be held, and then read it."""
        held: deque[tuple[int, int]] = deque()
        try:
            while self._fresh and len(held) < MOST_HELD:
                prog_id = self._fresh.popleft()
                held.append((prog_id, open_program(prog_id)))
            while held:
                self._tell(*held.popleft())
        finally:
            for _, fd in held:
                if fd >= 0:
                    os.close(fd)

    def _tell(self, prog_id: int, fd: int) -> None:
        """Send what is known of a program; ``fd`` holds it, or it is looked for."""
        if fd < 0:
            fd = open_program(prog_id)
        if fd < 0:
            details = ProgramDetails(prog_id, GONE)
        else:
            try:
                details = self._reader.read_open(prog_id, fd)
            finally:
                os.close(fd)
        self._send(message([getattr(details, field) for field in ProgramDetails.__slots__]))

    def _follow_cpus(self) -> None:
        """Listen on CPUs that came; on none where perf events are not allowed."""
        text = online_text()
        if text == self._online:
            return
        self._online = text
        online = parse_cpu_list(text)
        for cpu in set(self._rings).difference(online):
            self._poller.unregister(self._rings[cpu].fd)
            self._rings.pop(cpu).close()
        for cpu in online:
            if cpu not in self._rings:
                with contextlib.suppress(OSError):
                    fd = syscalls.perf_event_open(_attr(), -1, cpu)
                    self._rings[cpu] = Ring(fd, cpu, False, _RING_BYTES)
                    self._poller.register(fd, select.POLLIN)


def _be_prompt() -> None:
    """Have the scheduler run this process as soon as it wakes, if that is allowed."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_LOWEST_REALTIME))


def _attr() -> bytes:
    # Without sample_id_all, which would harm older listeners: see ``perf_event``.
    return syscalls.perf_event_attr(
        type=syscalls.TYPE_SOFTWARE,
        config=syscalls.COUNT_SW_DUMMY,
        flags=_FLAGS,
        wakeup_watermark=1,
    )

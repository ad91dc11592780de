"""The records of the probe (bpf/ksym_events.c): what they say, what was lost, what changed."""

from __future__ import annotations

import mmap
import struct
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ksym_plugin.timeline.symbols import (
    BPF_MODULE,
    BPF_PROG,
    UNNAMED_BPF,
    Load,
    Loss,
    Symbol,
    Unload,
    bpf_kind,
    is_image,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ksym_plugin.timeline.tracker import Change

#: The kinds of a change, which are also the keys of the map ``streams``.
ADD = 0
DEL = 1

#: struct record up to its name.
_HEAD = struct.Struct("=QQIIIIIHBB16s")
#: The 64-bit words of struct stream.
_STREAM_WORDS = 3
#: Numbers are 32 bits wide in records, and go round.
SEQ_MASK = 0xFFFFFFFF
_HALF = 1 << 31
CAUSE = "the probe's ring was full"


class Record(NamedTuple):
    """One change of one symbol: struct record, field for field."""

    stamp: int
    start: int
    length: int
    seq: int
    prog_id: int
    pid: int
    tid: int
    cpu: int
    kind: int
    is_prog: int
    comm: str
    name: str

    @classmethod
    def parse(cls, data: bytes) -> Record:
        """struct.error where ``data`` is too short."""
        *numbers, comm = _HEAD.unpack_from(data)
        return cls._make([*numbers, _text(comm), _text(data[_HEAD.size :])])


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "backslashreplace")


class Counts(NamedTuple):
    """What the probe has counted on one CPU for one kind of change, since it was loaded."""

    seq: int
    lost: int
    lost_images: int


def counts_buffer(cpus: int) -> array[int]:
    """Room for a value of the map ``streams``."""
    return array("Q", bytes(8 * _STREAM_WORDS * cpus))


def parse_counts(data: array[int]) -> list[Counts]:
    """A value of the map ``streams``: one Counts for each CPU there can be."""
    return [Counts(*data[at : at + _STREAM_WORDS]) for at in range(0, len(data), _STREAM_WORDS)]


@dataclass
class _Stream:
    """The records of one kind on one CPU.

    ``seq`` is the last one's number, ``at`` a time (CLOCK_MONOTONIC ns) until which
    nothing is missing unreported. ``lost`` counts what is reported as lost, and ``ahead``
    what of that no gap in the numbers has shown yet.
    """

    seq: int
    lost: int
    at: int
    ahead: int = 0


class Streams:
    """All streams by kind and CPU, from the time ``at`` on, when the probe had counted ``base``."""

    def __init__(self, base: Iterable[Iterable[Counts]], at: int) -> None:
        self._streams = [
            [_Stream(counts.seq & SEQ_MASK, counts.lost, at) for counts in cpus] for cpus in base
        ]

    def note(self, record: Record) -> Loss | None:
        """Take in a record; the loss that its number shows, if any."""
        stream = self._streams[record.kind][record.cpu]
        step = (record.seq - stream.seq) & SEQ_MASK
        if not 0 < step < _HALF:
            # From before the base.
            return None
        shown = min(step - 1, stream.ahead)
        stream.ahead -= shown
        count = step - 1 - shown
        loss = Loss(stream.at, record.stamp, CAUSE, count) if count else None
        stream.seq = record.seq
        stream.lost += count
        stream.at = max(stream.at, record.stamp)
        return loss

    def compare(self, kind: int, cpus: Iterable[Counts], before: int, after: int) -> list[Loss]:
        """The losses that no gap in the numbers has shown.

        The probe counted ``cpus`` between ``before`` and ``after``; all records that there
        were had been noted by then.
        """
        losses: list[Loss] = []
        for stream, counts in zip(self._streams[kind], cpus):
            count = counts.lost - stream.lost
            if count > 0:
                losses.append(Loss(stream.at, after, CAUSE, count))
                stream.lost += count
                stream.ahead += count
                stream.at = after
            elif counts.seq & SEQ_MASK == (stream.seq + stream.ahead) & SEQ_MASK:
                stream.at = before
        return losses


def merged(losses: Iterable[Loss]) -> list[Loss]:
    """The same losses by time, those that overlap in one."""
    found: list[Loss] = []
    for loss in sorted(losses, key=lambda loss: loss.since):
        last = found[-1] if found else None
        if last is None or loss.since > last.until or last.cause != loss.cause:
            found.append(loss)
            continue
        count = None if last.count is None or loss.count is None else last.count + loss.count
        found[-1] = Loss(last.since, max(last.until, loss.until), last.cause, count)
    return found


class Changes:
    """Turns records into changes.

    ``exact`` says whether a program's end is that of its code, and not of its pages.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        #: By start: the loads of subprograms whose program has not come, with the thread that
        #: loads them and the number of their batch. The kernel announces subprograms before
        #: their program, and before that has an id.
        self._subprograms: dict[int, tuple[int, int, Load]] = {}
        self._batch = 0

    def of(self, records: list[Record]) -> list[Change]:
        """The changes of one batch of records, by time.

        A subprogram that was in an earlier batch than its program comes again, with the
        program's id.
        """
        self._batch += 1
        changes: list[Change] = []
        for record in sorted(records, key=lambda record: (record.stamp, -record.kind)):
            if record.kind == ADD:
                changes += self._loads(record)
            else:
                self._subprograms.pop(record.start, None)
                name, prog_id = record.name or None, record.prog_id or None
                changes.append(Unload(record.start, record.stamp, record.stamp, name, prog_id))
        return changes

    def forget(self) -> None:
        """After a loss it is not known any more which program a subprogram belongs to."""
        self._subprograms.clear()

    def _loads(self, record: Record) -> list[Load]:
        load = self._load(record)
        if load.symbol.kind != BPF_PROG:
            return [load]
        if load.prog_id is None:
            self._subprograms[record.start] = (record.tid, self._batch, load)
            return [load]
        return [*self._identify(record.tid, load.prog_id), load]

    def _identify(self, tid: int, prog_id: int) -> list[Load]:
        """Give a thread's subprograms their program's id; those that were returned before."""
        own = [start for start, (loader, _, _) in self._subprograms.items() if loader == tid]
        again: list[Load] = []
        for start in own:
            _, batch, load = self._subprograms.pop(start)
            load.prog_id = prog_id
            if batch != self._batch:
                again.append(load)
        return again

    def _load(self, record: Record) -> Load:
        name = record.name or UNNAMED_BPF
        kind = bpf_kind(name)
        symbol = Symbol(record.start, record.start + record.length, name, kind, BPF_MODULE)
        # A whole page is the kernel's answer for an image whose end it does not keep.
        rounded = record.length >= mmap.PAGESIZE if is_image(kind) else not self._exact
        prog_id, at = record.prog_id or None, record.stamp
        return Load(symbol, at, at, prog_id, rounded, record.pid, record.comm)

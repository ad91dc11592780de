"""What the probes' records do not tell because they were lost.

The probe numbers its records, by CPU and kind of change: a stream. Those of a stream
come in their order, so a number that is left out was lost for certain, between the
stamps of its neighbours. The probe also counts what it could not pass on, and that
tells of losses after which nothing came.
"""

from __future__ import annotations

from ksym_plugin.sources.ksym_records import SEQ_MASK
from ksym_plugin.timeline.symbols import Loss

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Final

    from ksym_plugin.sources.ksym_records import Counts, Record

CAUSE: Final = "the probe's ring was full"
_HALF: Final = 1 << 31


class Stream:
    """The records of one kind on one CPU.

    ``seq`` is the last one's number, ``at`` a time (CLOCK_MONOTONIC ns) until which
    nothing is missing unreported. ``lost`` counts what is reported as lost, and ``ahead``
    what of that no gap in the numbers has shown yet.
    """

    __slots__ = ("ahead", "at", "lost", "seq")

    def __init__(self, seq: int, lost: int, at: int) -> None:
        self.seq = seq
        self.lost = lost
        self.at = at
        self.ahead = 0


class Streams:
    """All streams, from when the probe has counted ``base``, by kind and CPU."""

    def __init__(self, base: Iterable[Iterable[Counts]], at: int) -> None:
        self._streams = [
            [Stream(counts.seq & SEQ_MASK, counts.lost, at) for counts in cpus] for cpus in base
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
        """The losses that nobody has noticed but the probe itself.

        ``cpus`` was counted between ``before`` and ``after``, when all records there were
        had been taken in before.
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

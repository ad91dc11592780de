"""From the probe's records to changes."""

from __future__ import annotations

import mmap

from ksym_plugin.sources.ksym_records import ADD
from ksym_plugin.timeline.symbols import (
    BPF_MODULE,
    BPF_PROG,
    UNNAMED_BPF,
    Load,
    Symbol,
    Unload,
    bpf_kind,
    is_image,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.sources.ksym_records import Record
    from ksym_plugin.sources.source import Change


class Changes:
    """Turns records into changes.

    ``exact`` says whether a program's end is that of its code, and not of its pages.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        #: Subprograms by start, with the thread that loads them, and the batch they were
        #: in: the kernel announces them before their program has an id, and it last.
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
                prog_id = record.prog_id or None
                stamp = record.stamp
                changes.append(Unload(record.start, stamp, stamp, record.name or None, prog_id))
        return changes

    def forget(self) -> None:
        """After a loss: whose subprograms are waiting is not known any more."""
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
        """Give a thread's subprograms their program's id; those reported already."""
        own = [start for start, (owner, _, _) in self._subprograms.items() if owner == tid]
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
        # A whole page is what the kernel says of an image whose end it does not keep.
        rounded = record.length >= mmap.PAGESIZE if is_image(kind) else not self._exact
        prog_id = record.prog_id or None
        stamp = record.stamp
        return Load(symbol, stamp, stamp, prog_id, rounded, record.pid, record.comm)

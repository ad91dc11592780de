"""The polling source: bpf(2) asked again and again, and compared.

It needs CAP_SYS_ADMIN and CAP_SYSLOG. A change is known to lie between two polls, and
programs that come and go between them are noticed only by the ids they used up.
"""

from __future__ import annotations

import time

from ksym_plugin.kernel import privileges
from ksym_plugin.kernel.bpf_prog import ProgramReader
from ksym_plugin.kernel.kallsyms import KALLSYMS, read_tail
from ksym_plugin.kernel.snapshot import Taker, image_loads, program_loads
from ksym_plugin.timeline.symbols import Load, Loss, Unload
from ksym_plugin.timeline.tracker import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.timeline.tracker import Change

_SECOND = 1_000_000_000
#: All ids are listed again after so many times what the last listing took: polling stays at a
#: twentieth of a CPU however many programs there are.
_REST = 20
#: Images follow from attaching programs, mostly just after loading one, and all of kallsyms is
#: read to find them: every second for so long after a change, otherwise every half minute, and
#: with ten times as long a rest.
_IMAGES_AFTER = 3 * _SECOND
_SKIPPED_CAUSE = "programs came and went between polls"


class PollingSource(Source):
    """Changes from comparing what bpf(2) lists; see ``Source`` for the protocol.

    Changes come unloads first. An unload that would lie after the load that took its
    place is moved before it.
    """

    name = "polling"
    interval = 0.1

    def __init__(self, reader: ProgramReader | None = None, kallsyms: str = KALLSYMS) -> None:
        super().__init__()
        self._reader = reader or ProgramReader()
        self._kallsyms = kallsyms
        self._taker = Taker(False, self._reader, kallsyms)
        self._read_at = self._listed_at = self._images_at = time.monotonic_ns()
        self._list_due = self._images_due = self._changed_at = 0
        #: Since when there may be programs with ids after the last one known. At the start
        #: nobody knows how many of the ids above it were used up long before.
        self._newer_since = self._read_at
        self._count_skipped = False
        #: What is known by id; nothing under it where the program is not JITed.
        self._programs: dict[int, list[Load]] = {id: [] for id in self._reader.ids()}
        self._last_id = max(self._programs, default=0)
        taken = self._taker.take()
        if taken.limit:
            # Without ids and lengths there is nothing to compare.
            raise privileges.programs_hidden()
        self._images = {_place(load) for load in taken.loads if load.prog_id is None}
        for load in taken.loads:
            if load.prog_id in self._programs:
                self._programs[load.prog_id].append(load)

    def snapshot(self) -> list[Load]:
        taken = self._taker.take()
        self.notes = [taken.limit] if taken.limit else []
        self.lists_images = taken.lists_images
        return taken.loads

    def read(self) -> list[Change]:
        before = time.monotonic_ns()
        changes: list[Change] = []
        fresh = self._new_programs(changes)
        loads = [load for group in fresh.values() for load in group]
        if before >= self._list_due or (loads and self._takes_a_place(loads)):
            changes += self._gone_programs(fresh)
        self._programs.update(fresh)
        changes += loads
        if changes:
            self._changed_at = before
            self._images_due = min(self._images_due, self._images_at + _SECOND)
        if before >= self._images_due:
            changes += self._image_changes()
        self._read_at = before
        return changes

    def _new_programs(self, changes: list[Change]) -> dict[int, list[Load]]:
        """Programs after the last known id; a loss for ids that are missing joins ``changes``."""
        listed = self._reader.newer_than(self._last_id)
        found = [program for program in listed if program.id not in self._programs]
        now = time.monotonic_ns()
        fresh: dict[int, list[Load]] = {}
        for program in found:
            if program.hidden:
                self.notes = [str(privileges.programs_hidden())]
            earliest = max(self._read_at, program.load_time)
            fresh[program.id] = program_loads(program, self._reader, {}, earliest, now)
        if found:
            skipped = found[-1].id - self._last_id - len(found)
            if skipped:
                count = skipped if self._count_skipped else None
                changes.append(Loss(self._newer_since, now, _SKIPPED_CAUSE, count))
            self._count_skipped = True
            # Ids above this one may have come and gone since the poll before saw the end.
            self._newer_since = self._read_at
            self._last_id = found[-1].id
        return fresh

    def _takes_a_place(self, loads: list[Load]) -> bool:
        starts = {load.symbol.start for group in self._programs.values() for load in group}
        return any(load.symbol.start in starts for load in loads)

    def _gone_programs(self, fresh: dict[int, list[Load]]) -> list[Unload]:
        """What of the known programs is not listed any more, before ``fresh`` ones came."""
        before = time.monotonic_ns()
        listed = list(self._reader.ids())
        now = time.monotonic_ns()
        since, self._listed_at = self._listed_at, before
        self._list_due = now + _REST * (now - before)
        known = self._programs.keys() | fresh.keys()
        if any(id < self._last_id and id not in known for id in listed):
            # Ids start again from 1 after 2^31 of them: look at all of them anew.
            self._last_id, self._count_skipped = 0, False
        taken = {load.symbol.start: load.latest - 1 for new in fresh.values() for load in new}
        gone: list[Unload] = []
        for program_id in set(self._programs).difference(listed):
            for load in self._programs.pop(program_id):
                symbol = load.symbol
                latest = min(now, taken.get(symbol.start, now))
                earliest = min(max(since, load.earliest), latest)
                gone.append(Unload(symbol.start, earliest, latest, symbol.name, program_id))
        return gone

    def _image_changes(self) -> list[Change]:
        before = time.monotonic_ns()
        tail = read_tail(self._kallsyms)
        now = time.monotonic_ns()
        since, self._images_at = self._images_at, before
        recent = before - self._changed_at < _IMAGES_AFTER
        rest, shortest = (_REST, _SECOND) if recent else (10 * _REST, 30 * _SECOND)
        self._images_due = now + max(shortest, rest * (now - before))
        found = {_place(load): load for load in image_loads(tail, since, now)}
        known, self._images = self._images, set(found)
        ends = [Unload(start, since, now - 1, name) for start, name in sorted(known - found.keys())]
        return [*ends, *(load for place, load in found.items() if place not in known)]


def _place(load: Load) -> tuple[int, str]:
    return load.symbol.start, load.symbol.name

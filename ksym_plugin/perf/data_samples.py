"""The samples of a perf.data, read without perf.

Records are put in the order in which perf delivers them (util/ordered-events.c): by time,
within what PERF_RECORD_FINISHED_ROUND sets bounds to. So memory stays small however long
the recording is. What only perf can make samples of is refused with ``DataError``: then
``perf script`` has to read the file.

Layout: tools/perf/Documentation/perf.data-file-format.txt, perf_event_open(2), and
include/uapi/linux/perf_event.h.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from bisect import bisect_right

from ksym_plugin.perf import data
from ksym_plugin.perf.data import (
    CPUMODE,
    DAMAGE,
    KERNEL_MODE,
    RECORD_HEADER_ATTR,
    RECORD_MMAP,
    RECORD_MMAP2,
    RECORD_SAMPLE,
    RECORD_TRACING_DATA,
    DataError,
    Header,
    damaged,
    is_core_map,
    size_behind,
)
from ksym_plugin.perf.data_events import LONGEST_ATTR, Layouts, attr_of
from ksym_plugin.perf.samples import GUEST, HYPERVISOR, KERNEL, MARKERS, USER, Sample, frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from ksym_plugin.perf.data_events import Layout

    #: Time, number, how to read a sample (None: COMM or FORK), and where the record is.
    Entry = tuple[int, int, "Layout | None", bytes, int]

# More types of records: the kernel's, and from 64 on perf's own.
_LOST, _COMM, _FORK, _LOST_SAMPLES, _KSYMBOL = 2, 3, 7, 13, 17
_FINISHED_ROUND, _EVENT_UPDATE = 68, 78
_UPDATES_NAME = 2
#: PERF_RECORD_KSYMBOL_TYPE_OOL.
_OUT_OF_LINE = 2
_COMPRESSED = "it is compressed (perf record -z)"
_FOLDER = "it is a folder (perf record --threads)"
_TRACES = "its samples are made of hardware traces (Intel PT, CoreSight and the like)"
#: AUXTRACE_INFO, AUXTRACE, COMPRESSED and COMPRESSED2.
_REFUSED = {70: _TRACES, 71: _TRACES, 81: _COMPRESSED, 83: _COMPRESSED}
#: HEADER_AUXTRACE, HEADER_DIR_FORMAT and HEADER_COMPRESSED.
_REFUSED_FEATURES = {18: _TRACES, 24: _FOLDER, 27: _COMPRESSED}

#: The region of PERF_RECORD_MISC_KERNEL, _USER, _HYPERVISOR, _GUEST_KERNEL, _GUEST_USER.
_REGIONS = {1: KERNEL, 2: USER, 3: HYPERVISOR, 4: GUEST, 5: GUEST}
_MARKERS = {mode: MARKERS[region].to_bytes(8, sys.byteorder) for mode, region in _REGIONS.items()}
#: What a callchain that tells its regions mostly begins with.
_ALL_MARKERS = frozenset(_MARKERS.values())
_NO_TIMES = (0, (1 << 64) - 1)

_OF_TASKS = (_COMM, _FORK)
_RECORD_SIZE = 8
#: The least size of records whose fields are read.
_LEAST = {
    RECORD_MMAP: 40,
    _LOST: 24,
    _COMM: 24,
    _FORK: 32,
    RECORD_MMAP2: 72,
    _LOST_SAMPLES: 16,
    _KSYMBOL: 24,
    RECORD_HEADER_ATTR: 72,
    RECORD_TRACING_DATA: 12,
    _EVENT_UPDATE: 24,
}
_CHUNK = 1 << 20
#: How many records, and bytes of such, are held back at the most.
_MOST_HELD = 1 << 20
_MOST_HELD_SIZE = 1 << 28


class DataSamples:
    """A perf.data that is open for reading its samples, once.

    ``recorded`` is what the header says of the kernel. ``lost`` counts what the kernel said it
    had no room for, ``unknown`` samples that are of no event of the file. ``kernel_maps``
    are start and end of modules, and of the copies of code that kprobes are on.
    """

    def __init__(self, path: str) -> None:
        """DataError if the file cannot be opened, or is of a kind that is not read here."""
        if os.path.isdir(path):
            raise DataError(_FOLDER)
        self.recorded = data.read(path)
        self.lost = 0
        self.unknown = 0
        self.kernel_maps: list[tuple[int, int]] = []
        self._comms = {0: "swapper"}
        self._values: dict[tuple[int, int], int] = {}
        #: Records held back, and the bytes read since some were let go.
        self._held: list[Entry] = []
        self._held_size = 0
        #: The newest time of the rounds before this one.
        self._limit = 0
        #: Where in the data the chunk begins that is being read.
        self._place = 0
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - closed by close()
        except (OSError, ValueError) as error:
            raise DataError(f"it cannot be opened ({error})") from None
        try:
            self._open()
        except BaseException as error:
            self.close()
            if isinstance(error, DAMAGE):
                raise damaged() from error
            raise

    def __enter__(self) -> DataSamples:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    # The header

    def _open(self) -> None:
        self._header = header = Header(self._file)
        self._order = header.order
        self._layouts = Layouts(header, self.recorded.names)
        self._is_swapped = header.byteorder != sys.byteorder
        self._record = struct.Struct(header.order + "IHH")
        self._word = struct.Struct(header.order + "Q")
        for feature in self.recorded.features & set(_REFUSED_FEATURES):
            raise DataError(_REFUSED_FEATURES[feature])
        if self.recorded.other_split:
            raise DataError(self.recorded.other_split)
        file_size = os.fstat(self._file.fileno()).st_size
        #: How many bytes of records are still to be read.
        self._left = file_size - self._file.tell()
        if header.is_pipe:
            return
        begin, self._left = header.data
        if not self._left or begin + self._left > file_size:
            raise DataError("it is not complete: perf record was killed, or the file is cut")
        self._read_attrs()
        self._file.seek(begin)

    def _read_attrs(self) -> None:
        """Each attr, and the ids of its event, which are elsewhere."""
        file, (at, size) = self._file, self._header.attrs
        end = at + size
        while at < end:
            file.seek(at)
            entry = file.read(LONGEST_ATTR + 16)
            attr = attr_of(entry, self._order)
            ids_at, ids_size = struct.unpack_from(self._order + "QQ", entry, len(attr))
            if ids_size > 8 * self._layouts.ids_left:
                raise damaged()
            file.seek(ids_at)
            self._layouts.add(attr, file.read(ids_size))
            at += len(attr) + 16

    # Samples

    def samples(self) -> Iterator[Sample]:
        """Each sample, in perf's order.

        DataError, also after some samples, for what is not read here or is damaged.
        """
        try:
            for batch in self._batches():
                yield from self._samples_of(batch)
        except DAMAGE as error:
            raise damaged() from error

    def _samples_of(self, batch: list[Entry]) -> Iterator[Sample]:
        comms = self._comms
        for time, _, layout, chunk, at in batch:
            if layout is None:
                self._follow_task(chunk, at)
                continue
            head = layout.unpack(chunk, at)
            if layout.is_partial:
                head = layout.pick(head + layout.defaults)
            misc, size, ip, pid, tid, cpu, period, depth = head
            start = at + layout.head_size
            counts = None
            if layout.has_counts:
                counts, depth, start = layout.read_counts(chunk, at, at + size)
            end = start + 8 * depth
            if end > at + size:
                raise damaged()
            callchain = chunk[start:end]
            if self._is_swapped:
                words = array("Q", callchain)
                words.byteswap()
                callchain = words.tobytes()
            if callchain[:8] not in _ALL_MARKERS or callchain[-8:] in _ALL_MARKERS:
                callchain = _complete(callchain, ip, misc & CPUMODE)
            comm = comms.get(tid) or f":{tid}"
            when = time if layout.time_at else None
            if counts is None:
                yield Sample(layout, comm, pid, tid, cpu, when, period, callchain)
            else:
                for other, period in self._counted(counts, layout, tid):
                    yield Sample(other, comm, pid, tid, cpu, when, period, callchain)

    def _counted(
        self, counts: list[tuple[int, int]], layout: Layout, tid: int
    ) -> Iterator[tuple[Layout, int]]:
        """The events that counted on since their last sample, and by how much.

        perf makes a sample of each member of a group of counters (perf record -e '{…}:S').
        """
        for number, value in counts:
            other = self._layouts.by_id.get(number)
            if other is None:
                self.unknown += 1
                continue
            key = (number, tid if layout.inherits else 0)
            period = value - self._values.get(key, 0) & (1 << 64) - 1
            self._values[key] = value
            if period:
                yield other, period

    def _follow_task(self, chunk: bytes, at: int) -> None:
        """PERF_RECORD_COMM names a task, PERF_RECORD_FORK begins one with its parent's name."""
        kind, _, size = self._record.unpack_from(chunk, at)
        if kind == _COMM:
            _, tid = struct.unpack_from(self._order + "ii", chunk, at + 8)
            name = chunk[at + 16 : at + size].partition(b"\0")[0]
            self._comms[tid] = name.decode("utf-8", "surrogateescape")
            return
        _, _, tid, parent = struct.unpack_from(self._order + "4i", chunk, at + 8)
        if parent in self._comms:
            self._comms[tid] = self._comms[parent]
        else:
            self._comms.pop(tid, None)

    # Records

    def _batches(self) -> Iterator[list[Entry]]:
        """Samples and changes of tasks in perf's order.

        Those without a time come at once. The others come by time, when a round has ended
        that began after they were written.
        """
        begun = b""
        piece = self._read()
        while piece:
            chunk = begun + piece
            at = yield from self._scan(chunk)
            begun = chunk[at:]
            if at > len(chunk):  # What follows a record and is of no use here.
                self._left -= at - len(chunk)
                self._file.seek(at - len(chunk), os.SEEK_CUR)
            piece = self._read()
            self._place += at
            self._held_size += at
        if begun or self._left:
            raise damaged()
        self._held.sort()
        yield self._held

    def _read(self) -> bytes:
        piece = self._file.read(max(0, min(_CHUNK, self._left)))
        self._left -= len(piece)
        return piece

    def _scan(self, chunk: bytes) -> Generator[list[Entry], None, int]:
        """The batches that are complete with the whole records of a chunk; where those end."""
        record, word = self._record.unpack_from, self._word.unpack_from
        layouts, held, place = self._layouts, self._held, self._place
        sole, by_id = layouts.sole, layouts.by_id if layouts.is_settled else {}
        last = len(chunk) - _RECORD_SIZE
        at_once: list[Entry] = []
        at = 0
        while at <= last:
            kind, _, size = record(chunk, at)
            if size < _RECORD_SIZE or (kind in _LEAST and size < _LEAST[kind]):
                raise damaged()
            if at + size > len(chunk):
                break
            if kind == RECORD_SAMPLE:
                layout = sole or by_id.get(word(chunk, at + layouts.id_at)[0])
                layout = layout or self._layout_of(chunk, at)
                if layout is not None:
                    if size < layout.head_size:
                        raise damaged()
                    time = word(chunk, at + layout.time_at)[0] if layout.time_at else 0
                    to = at_once if time in _NO_TIMES else held
                    to.append((time, place + at, layout, chunk, at))
            elif kind == _FINISHED_ROUND:
                yield at_once
                at_once = []
                yield self._end_round()
            elif kind in _OF_TASKS:
                time = self._time_of(chunk, at, size)
                to = at_once if time in _NO_TIMES else held
                to.append((time, place + at, None, chunk, at))
            else:
                at += self._take_in(kind, chunk, at, size)
            at += size
        yield at_once
        if len(held) > _MOST_HELD or self._held_size > _MOST_HELD_SIZE:
            held.sort()  # perf, too, lets the older half go where a round is too long.
            yield self._flush(len(held) // 2)
        return at

    def _end_round(self) -> list[Entry]:
        """What no later record can come before, in order."""
        held = self._held
        held.sort()
        ready = self._flush(bisect_right(held, (self._limit + 1,)))
        if held or ready:
            self._limit = max(self._limit, (held or ready)[-1][0])
        return ready

    def _flush(self, count: int) -> list[Entry]:
        ready = self._held[:count]
        del self._held[:count]
        self._held_size = 0
        return ready

    def _layout_of(self, chunk: bytes, at: int) -> Layout | None:
        """Of which event the sample at ``at`` is; None, and counted, if it is of none."""
        layouts = self._layouts
        if not layouts.is_settled:
            layouts.settle()
        layout = layouts.sole or layouts.of(self._word.unpack_from(chunk, at + layouts.id_at)[0])
        if layout is None:
            self.unknown += 1
        return layout

    def _take_in(self, kind: int, chunk: bytes, at: int, size: int) -> int:
        """Another record; how much follows it that is not counted in its size."""
        record = chunk[at : at + size]
        if kind in (RECORD_MMAP, RECORD_MMAP2):  # A module's, or something of a user's.
            _, misc, _ = self._record.unpack_from(record)
            if misc & CPUMODE == KERNEL_MODE and not is_core_map(kind, record):
                begin, length = struct.unpack_from(self._order + "QQ", record, 16)
                self.kernel_maps.append((begin, begin + length))
        elif kind == _KSYMBOL:
            begin, length, what = struct.unpack_from(self._order + "QIH", record, 8)
            if what == _OUT_OF_LINE:
                self.kernel_maps.append((begin, begin + length))
        elif kind in (_LOST, _LOST_SAMPLES):
            self.lost += self._word.unpack_from(record, 16 if kind == _LOST else 8)[0]
        elif kind == RECORD_HEADER_ATTR:
            attr = attr_of(record[_RECORD_SIZE:], self._order)
            self._layouts.add(attr, record[_RECORD_SIZE + len(attr) :])
        elif kind == _EVENT_UPDATE:
            what, number = struct.unpack_from(self._order + "QQ", record, 8)
            if what == _UPDATES_NAME and number in self._layouts.by_id:
                name = record[24:].partition(b"\0")[0]
                self._layouts.by_id[number].name = name.decode("utf-8", "replace")
        elif kind in _REFUSED:
            raise DataError(_REFUSED[kind])
        return size_behind(kind, chunk, at, self._order)

    def _time_of(self, chunk: bytes, at: int, size: int) -> int:
        """When a record was written; 0 if it does not say."""
        if not self._layouts.all:
            return 0
        layout = first = self._layouts.all[0]
        if len(self._layouts.all) > 1 and first.id_back:
            (number,) = self._word.unpack_from(chunk, at + size - first.id_back)
            layout = self._layouts.by_id.get(number, first)
        if not layout.time_back:
            return 0
        return int(self._word.unpack_from(chunk, at + size - layout.time_back)[0])


def _complete(callchain: bytes, ip: int, mode: int) -> bytes:
    """A callchain that tells its regions, by the sample's cpumode if it does not itself."""
    if not frames(callchain):
        return _MARKERS.get(mode, b"") + ip.to_bytes(8, sys.byteorder)
    if callchain[:8] in _ALL_MARKERS or _REGIONS.get(mode, KERNEL) == KERNEL:
        return callchain
    return _MARKERS[mode] + callchain

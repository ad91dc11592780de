"""The events of a perf.data: how the samples of each lie in their records.

Layout: perf_event_open(2), PERF_RECORD_SAMPLE, and include/uapi/linux/perf_event.h.
"""

from __future__ import annotations

import struct
from operator import itemgetter

from ksym_plugin.kernel.clocks import clock_of_attr
from ksym_plugin.perf.data import DataError, damaged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.perf.data import Header

# Bits of sample_type.
_IP, _TID, _TIME, _ADDR, _READ, _CALLCHAIN, _ID, _CPU, _PERIOD, _STREAM_ID = (
    1 << bit for bit in range(10)
)
_RAW, _IDENTIFIER = 1 << 10, 1 << 16
#: What begins a sample, in this order, with its form and how many values are read: 8 bytes each.
_HEAD = (
    (_IDENTIFIER, "8x", 0),
    (_IP, "Q", 1),
    (_TID, "ii", 2),
    (_TIME, "8x", 0),
    (_ADDR, "8x", 0),
    (_ID, "8x", 0),
    (_STREAM_ID, "8x", 0),
    (_CPU, "i4x", 1),
    (_PERIOD, "Q", 1),
)
_WHOLE_HEAD = 8
#: What ends any other record, in this order, where the attr has sample_id_all.
_TRAILER = (_TID, _TIME, _ID, _STREAM_ID, _CPU, _IDENTIFIER)
# Bits of read_format.
_TOTAL_TIMES, _READ_ID, _READ_GROUP, _READ_LOST = 1 | 2, 4, 8, 16
# Bit-fields of the attr.
_INHERIT, _SAMPLE_ID_ALL = 1 << 1, 1 << 18

#: perf refuses attrs that are longer than it knows: 144 bytes in Linux 6.18.
LONGEST_ATTR = 4096
#: Type and config of PERF_COUNT_SW_BPF_OUTPUT.
_BPF_OUTPUT = (1, 10)
_SHORTEST_ATTR = 64
_MOST_EVENTS = 1 << 16
_MOST_IDS = 1 << 20


class Layouts:
    """The events of a file.

    ``settle`` has to be called before the first sample is looked up. Then ``sole`` is the
    event of all samples, where there is one; of others the id is at ``id_at`` in the record.
    """

    def __init__(self, header: Header, names: list[str]) -> None:
        self._header = header
        self._names = names
        self.all: list[Layout] = []
        self.by_id: dict[int, Layout] = {}
        #: How many more ids there may be.
        self.ids_left = _MOST_IDS
        self.is_settled = False
        self.sole: Layout | None = None
        self.id_at = 0

    def add(self, attr: bytes, ids: bytes) -> None:
        """One more event, from its raw perf_event_attr and the ids that its samples have.

        DataError behind the first sample: perf writes all events before. Each of many would
        have all that came before looked at again.
        """
        if self.is_settled:
            raise DataError("it has events behind samples")
        name = self._names[len(self.all)] if len(self.all) < len(self._names) else ""
        layout = Layout(attr, self._header, name)
        self.all.append(layout)
        self.ids_left -= len(ids) // 8
        if len(self.all) > _MOST_EVENTS or self.ids_left < 0:
            raise damaged()
        for (number,) in struct.iter_unpack(self._header.order + "Q", ids[: len(ids) // 8 * 8]):
            self.by_id[number] = layout

    def settle(self) -> None:
        """Find out how samples tell which event they are of. DataError if they do not."""
        if not self.all:
            raise DataError("it has samples before it says of what")
        if not all(layout.name for layout in self.all):
            raise DataError("it does not name its events")
        if len(self.all) == 1:
            self.sole = self.all[0]
        elif not self.all[0].id_at or len({layout.id_at for layout in self.all}) > 1:
            raise DataError("its samples do not tell which event they are of")
        self.id_at = self.all[0].id_at
        self.is_settled = True

    def of(self, number: int) -> Layout | None:
        """The event with an id. What perf made up itself has none, and is of the first."""
        return self.by_id.get(number) or (None if number else self.all[0])


class Layout:
    """One event.

    ``unpack`` reads what begins its samples: misc, size, ip, pid, tid, cpu, period and the depth
    of the callchain. Where some are not recorded (``is_partial``), ``pick`` takes them from
    ``defaults``, which are to be put behind what was read.
    ``clock`` is that of its times, as ``kernel.clocks`` names it; None if a history cannot
    place it.
    """

    def __init__(self, attr: bytes, header: Header, name: str) -> None:
        """struct.error if ``attr``, a raw perf_event_attr, is cut short."""
        self._order = header.order
        kind, _, config, period, self.sample_type, self._read_format, flags = struct.unpack_from(
            header.order + "IIQQQQQ", attr
        )
        if (kind, config) == _BPF_OUTPUT and self.sample_type & _RAW:
            # evsel__set_offcpu_sample in util/evsel.c (perf record --off-cpu).
            raise DataError("perf makes other samples of what programs have put out")
        if header.order == ">":  # Where bytes are big-endian the first bit-field is the highest.
            flags = int(f"{flags:064b}"[::-1], 2)
        self.inherits = bool(flags & _INHERIT)
        #: Whether counters are read with each sample.
        self.has_counts = bool(self.sample_type & _READ)
        self.name, self.clock = name, clock_of_attr(attr, header.byteorder)
        self._set_head(period)
        #: How far before the end of another record its time and its id are; 0 for nowhere.
        self.time_back = self.id_back = 0
        if flags & _SAMPLE_ID_ALL:
            self._set_trailer()

    def read_counts(
        self, chunk: bytes, at: int, end: int
    ) -> tuple[list[tuple[int, int]], int, int]:
        """Id and value of each counter read with a sample, the depth of its callchain, and
        where that begins. ``at`` and ``end`` are the record's.

        struct.error if that is more than there is.
        """
        words = memoryview(chunk)[at + self.head_size : end]
        word = struct.Struct(self._order + "Q").unpack_from
        times, with_id, in_group, with_lost = (
            bin(self._read_format & bits).count("1")
            for bits in (_TOTAL_TIMES, _READ_ID, _READ_GROUP, _READ_LOST)
        )
        # A group's times stand before its counters, another's between value and id.
        gap = 0 if in_group else times
        count, place = (word(words)[0], 8 * (1 + times)) if in_group else (1, 0)
        if count > len(words) // 8:
            raise struct.error("more counters than there is room for")
        counts = []
        for _ in range(count):
            number = word(words, place + 8 * (1 + gap))[0] if with_id else 0
            counts.append((number, word(words, place)[0]))
            place += 8 * (1 + gap + with_id + with_lost)
        depth = 0
        if self.sample_type & _CALLCHAIN:
            (depth,) = word(words, place)
            place += 8
        return counts, depth, at + self.head_size + place

    def _set_head(self, period: int) -> None:
        form, count, at = self._order + "4xHH", 2, 8
        places: dict[int, int] = {}
        offsets: dict[int, int] = {}
        for field, part, values in _HEAD:
            if self.sample_type & field:
                places[field], offsets[field] = count, at
                form, count, at = form + part, count + values, at + 8
        if self.sample_type & _CALLCHAIN and not self.has_counts:
            places[_CALLCHAIN] = count
            form, count, at = form + "Q", count + 1, at + 8
        self.unpack, self.head_size = struct.Struct(form).unpack_from, at
        self.is_partial = count < _WHOLE_HEAD
        self.defaults = (0, -1, -1, -1, period, 0)
        self.pick = itemgetter(
            0,
            1,
            places.get(_IP, count),
            places.get(_TID, count + 1),
            places.get(_TID, count + 1) + 1,
            places.get(_CPU, count + 3),
            places.get(_PERIOD, count + 4),
            places.get(_CALLCHAIN, count + 5),
        )
        #: Where in a sample its time and its id are; 0 for nowhere.
        self.time_at = offsets.get(_TIME, 0)
        self.id_at = offsets.get(_IDENTIFIER) or offsets.get(_ID, 0)

    def _set_trailer(self) -> None:
        back = 0
        for field in reversed(_TRAILER):
            if self.sample_type & field:
                back += 8
                if field == _TIME:
                    self.time_back = back
                elif field in (_ID, _IDENTIFIER) and not self.id_back:
                    self.id_back = back


def attr_of(entry: bytes, order: str) -> bytes:
    """The perf_event_attr that ``entry`` begins with; the first ones did not say their size."""
    (size,) = struct.unpack_from(order + "I", entry, 4)
    size = size or _SHORTEST_ATTR
    if not _SHORTEST_ATTR <= size <= min(len(entry), LONGEST_ATTR):
        raise damaged()
    return entry[:size]

"""Writes perf.data files, after perf_event_open(2) and perf.data-file-format.txt."""

from __future__ import annotations

import struct

IP, TID, TIME, ADDR, READ, CALLCHAIN, ID, CPU, PERIOD, STREAM_ID = (1 << bit for bit in range(10))
RAW, BRANCH_STACK, REGS_USER, STACK_USER, WEIGHT = (1 << bit for bit in range(10, 15))
IDENTIFIER = 1 << 16
USUAL = IP | TID | TIME | CALLCHAIN | CPU | PERIOD
MMAP, LOST, COMM, EXIT, FORK, SAMPLE, MMAP2, LOST_SAMPLES, KSYMBOL = 1, 2, 3, 4, 7, 9, 10, 13, 17
HEADER_ATTR, TRACING_DATA, FINISHED_ROUND, EVENT_UPDATE, HEADER_FEATURE = 64, 66, 68, 78, 80
HOST, RELEASE, ARCH, EVENT_DESC = 3, 4, 6, 12
KERNEL_MODE, USER_MODE, HYPERVISOR_MODE, GUEST_KERNEL_MODE, GUEST_USER_MODE = 1, 2, 3, 4, 5
INHERIT, SAMPLE_ID_ALL, USE_CLOCKID = 1, 18, 25
HEAD_SIZE = 104
ATTR_SIZE = 128


class PerfEvent:
    """An event of a file; ``flags`` are numbers of bit-fields."""

    def __init__(
        self,
        name: str = "cpu-clock",
        sample_type: int = USUAL,
        ids: tuple[int, ...] = (),
        read_format: int = 0,
        flags: tuple[int, ...] = (SAMPLE_ID_ALL,),
        period: int = 4000,
        branches: int = 0,
        clockid: int = 0,
        config: int = 0,
    ) -> None:
        self.name = name
        self.sample_type = sample_type
        self.ids = ids
        self.read_format = read_format
        self.flags = flags
        self.period = period
        self.branches = branches
        self.clockid = clockid
        self.config = config


class PerfFile:
    """A perf.data of a machine of byte order ``order`` (``<`` or ``>``)."""

    def __init__(self, *events: PerfEvent, order: str = "<", arch: str | None = "x86_64") -> None:
        self.events = events or (PerfEvent(),)
        self.order = order
        self.features: dict[int, bytes] = {} if arch is None else {ARCH: self.string(arch)}
        self.records: list[bytes] = []

    def pack(self, form: str, *values: int | bytes) -> bytes:
        return struct.pack(self.order + form, *values)

    def string(self, text: str) -> bytes:
        content = text.encode() + b"\0"
        content += b"\0" * (-len(content) % 64)
        return self.pack("I", len(content)) + content

    def record(self, kind: int, body: bytes = b"", misc: int = 0) -> bytes:
        return self.pack("IHH", kind, misc, 8 + len(body)) + body

    def add(self, kind: int, body: bytes = b"", misc: int = 0) -> None:
        self.records.append(self.record(kind, body, misc))

    def attr(self, event: PerfEvent) -> bytes:
        flags = sum(1 << (bit if self.order == "<" else 63 - bit) for bit in event.flags)
        fixed = (1, ATTR_SIZE, event.config, event.period, event.sample_type, event.read_format)
        attr = self.pack("IIQQQQQ", *fixed, flags).ljust(72, b"\0")
        attr += self.pack("Q", event.branches).ljust(20, b"\0") + self.pack("i", event.clockid)
        return attr.ljust(ATTR_SIZE, b"\0")

    # Records

    def sample(
        self,
        event: PerfEvent | None = None,
        misc: int = KERNEL_MODE,
        *,
        ip: int = 0,
        pid: int = 1,
        tid: int = 2,
        time: int = 0,
        event_id: int = 0,
        cpu: int = 0,
        period: int = 1,
        counts: tuple[tuple[int, int], ...] = ((0, 0),),
        chain: tuple[int, ...] = (),
        tail: bytes = b"",
    ) -> None:
        """A sample; ``counts`` are value and id of counters, ``tail`` stands behind the rest."""
        event = event or self.events[0]
        parts = (
            (IDENTIFIER, self.pack("Q", event_id)),
            (IP, self.pack("Q", ip)),
            (TID, self.pack("ii", pid, tid)),
            (TIME, self.pack("Q", time)),
            (ADDR, self.pack("Q", 0x1111)),
            (ID, self.pack("Q", event_id)),
            (STREAM_ID, self.pack("Q", 0x2222)),
            (CPU, self.pack("iI", cpu, 0)),
            (PERIOD, self.pack("Q", period)),
            (READ, self.read_values(event.read_format, counts)),
            (CALLCHAIN, self.pack(f"{1 + len(chain)}Q", len(chain), *chain)),
        )
        body = b"".join(part for bit, part in parts if event.sample_type & bit)
        self.add(SAMPLE, body + tail, misc)

    def read_values(self, form: int, counts: tuple[tuple[int, int], ...]) -> bytes:
        times = b"".join(self.pack("Q", 77) for bit in (1, 2) if form & bit)
        values = [
            self.pack("Q", value)
            + (self.pack("Q", number) if form & 4 else b"")
            + (self.pack("Q", 5) if form & 16 else b"")
            for value, number in counts
        ]
        if form & 8:
            return self.pack("Q", len(counts)) + times + b"".join(values)
        return values[0][:8] + times + values[0][8:]

    def trailer(self, time: int, event_id: int = 0) -> bytes:
        parts = (
            (TID, self.pack("ii", 0, 0)),
            (TIME, self.pack("Q", time)),
            (ID, self.pack("Q", event_id)),
            (STREAM_ID, self.pack("Q", 0)),
            (CPU, self.pack("iI", 0, 0)),
            (IDENTIFIER, self.pack("Q", event_id)),
        )
        event = next((one for one in self.events if event_id in one.ids), self.events[0])
        if SAMPLE_ID_ALL not in event.flags:
            return b""
        return b"".join(part for bit, part in parts if event.sample_type & bit)

    def comm(self, pid: int, tid: int, name: bytes, time: int = 0, event_id: int = 0) -> None:
        text = name + b"\0" * (8 - len(name) % 8)
        self.add(COMM, self.pack("ii", pid, tid) + text + self.trailer(time, event_id))

    def fork(self, pid: int, parent: int, tid: int, from_tid: int, time: int = 0) -> None:
        body = self.pack("iiiiQ", pid, parent, tid, from_tid, time)
        self.add(FORK, body + self.trailer(time))

    def kernel_map(self, start: int) -> None:
        body = self.pack("iiQQQ", -1, 0, start, 1 << 20, start)
        self.add(MMAP, body + b"[kernel.kallsyms]_text\0\0", KERNEL_MODE)

    # The whole

    def descriptions(self) -> bytes:
        content = self.pack("II", len(self.events), ATTR_SIZE)
        for event in self.events:
            content += self.attr(event) + self.pack("I", len(event.ids)) + self.string(event.name)
            content += self.pack(f"{len(event.ids)}Q", *event.ids)
        return content

    def file(self) -> bytes:
        ids = b"".join(self.pack(f"{len(event.ids)}Q", *event.ids) for event in self.events)
        attrs_at = HEAD_SIZE + len(ids)
        attrs, at = b"", HEAD_SIZE
        for event in self.events:
            attrs += self.attr(event) + self.pack("QQ", at, 8 * len(event.ids))
            at += 8 * len(event.ids)
        data = b"".join(self.records)
        data_at = attrs_at + len(attrs)
        features = {**self.features, EVENT_DESC: self.descriptions()}
        at = data_at + len(data) + 16 * len(features)
        table = contents = b""
        for _, content in sorted(features.items()):
            table += self.pack("QQ", at + len(contents), len(content))
            contents += content
        bits = sum(1 << bit for bit in features)
        head = b"PERFILE2" if self.order == "<" else b"2ELIFREP"
        head += self.pack("QQ", HEAD_SIZE, ATTR_SIZE + 16)
        head += self.pack("6Q", attrs_at, len(attrs), data_at, len(data), 0, 0)
        head += self.pack("4Q", bits & (1 << 64) - 1, bits >> 64, 0, 0)
        return head + ids + attrs + data + table + contents

    def pipe(self) -> bytes:
        """The same as ``perf record -o -`` writes it."""
        head = (b"PERFILE2" if self.order == "<" else b"2ELIFREP") + self.pack("Q", 16)
        for event in self.events:
            ids = self.pack(f"{len(event.ids)}Q", *event.ids)
            head += self.record(HEADER_ATTR, self.attr(event) + ids)
        for feature, content in sorted({**self.features, EVENT_DESC: self.descriptions()}.items()):
            head += self.record(HEADER_FEATURE, self.pack("Q", feature) + content)
        return head + b"".join(self.records)

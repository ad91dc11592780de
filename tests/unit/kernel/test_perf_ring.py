"""Records and rings, against an encoder that follows the kernel's own writer."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.kernel.perf_ring import BpfEvent, KSymbol, Lost, parse, unrolled

_NAMES = st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), max_size=511)
_PADDING = st.binary(max_size=12).map(lambda raw: raw * 8)
_U64 = st.integers(0, 2**64 - 1)


def _record(kind: int, body: bytes, padding: bytes) -> bytes:
    """A record as the kernel lays it out: header, body, then whatever it appends."""
    assert len(body) % 8 == 0 and len(padding) % 8 == 0
    return struct.pack("<IHH", kind, 0, 8 + len(body) + len(padding)) + body + padding


def _ksymbol(start, length, kind, unregister, name, padding=b""):
    raw = name.encode() + b"\0"
    raw += b"\0" * (-len(raw) % 8)
    return _record(17, struct.pack("<QIHH", start, length, kind, unregister) + raw, padding)


def _bpf_event(kind, prog_id, tag, padding=b""):
    return _record(18, struct.pack("<HHI8s", kind, 0, prog_id, tag), padding)


_KSYMBOLS = st.tuples(
    st.just("ksymbol"), _U64, st.integers(0, 2**32 - 1), st.integers(0, 3), st.booleans(), _NAMES
)
_EVENTS = st.tuples(
    st.just("event"),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=8, max_size=8),
)
_LOSTS = st.tuples(st.just("lost"), _U64, _U64)
_OTHERS = st.tuples(st.just("other"), st.sampled_from([1, 3, 9, 13, 99]), _PADDING)


def _encode(item, padding):
    kind, *fields = item
    if kind == "ksymbol":
        return _ksymbol(*fields, padding)
    if kind == "event":
        return _bpf_event(*fields, padding)
    if kind == "lost":
        return _record(2, struct.pack("<QQ", *fields), padding)
    return _record(fields[0], fields[1], padding)


def _seen(record):
    if isinstance(record, KSymbol):
        unregister = record.unregister
        return ("ksymbol", record.start, record.length, record.type, unregister, record.name)
    if isinstance(record, BpfEvent):
        return ("event", record.type, record.id, bytes.fromhex(record.tag))
    assert isinstance(record, Lost)
    return ("lost", record.count)


def _expected(item):
    return ("lost", item[2]) if item[0] == "lost" else item


_STREAMS = st.lists(
    st.tuples(st.one_of(_KSYMBOLS, _EVENTS, _LOSTS, _OTHERS), _PADDING), max_size=12
)


@given(_STREAMS)
def test_records_are_read_whatever_the_kernel_appends(items):
    data = b"".join(_encode(item, padding) for item, padding in items)
    records, whole = parse(data)
    assert whole
    expected = [_expected(item) for item, _ in items if item[0] != "other"]
    assert [_seen(record) for record in records] == expected


@given(_STREAMS, st.data())
def test_a_torn_stream_gives_the_records_before_the_tear(items, data):
    encoded = [_encode(item, padding) for item, padding in items]
    stream = b"".join(encoded)
    cut = data.draw(st.integers(0, len(stream)))
    records, whole = parse(stream[:cut])
    before = [_expected(item) for item, _ in items if item[0] != "other"]
    assert [_seen(record) for record in records] == before[: len(records)]
    edges = {sum(map(len, encoded[:count])) for count in range(len(encoded) + 1)}
    assert whole == (cut in edges)


@given(st.binary(max_size=400))
def test_hostile_bytes_never_raise(data):
    records, _ = parse(data)
    assert len(records) * 8 <= len(data)


def test_a_name_without_an_end_is_not_a_record_and_is_told():
    body = struct.pack("<QIHH", 1, 2, 1, 0) + b"abcdefgh"
    records, whole = parse(_record(17, body, b"") + _bpf_event(1, 5, b"12345678"))
    assert [type(record) for record in records] == [BpfEvent]
    assert not whole


def test_a_name_is_not_read_beyond_its_record():
    body = struct.pack("<QIHH", 1, 2, 1, 0)
    records, whole = parse(_record(17, body, b"") + b"name\0\0\0\0")
    assert records == [] and not whole


@given(st.integers(1, 6), st.integers(0, 2**63), st.data())
def test_what_goes_round_the_end_is_put_together(exponent, tail, data):
    size = 1 << exponent
    length = data.draw(st.integers(0, size))
    written = data.draw(st.binary(min_size=length, max_size=length))
    ring = bytearray(size)
    for offset, byte in enumerate(written):
        ring[(tail + offset) % size] = byte
    assert unrolled(memoryview(ring), tail, tail + length) == written


def test_positions_that_cannot_be_give_nothing():
    ring = memoryview(bytearray(16))
    assert unrolled(ring, 10, 9) == b""
    assert unrolled(ring, 0, 17) == b""

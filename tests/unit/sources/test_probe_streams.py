"""Losses by number and by count, against a kernel that drops what it likes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.sources.probe_records import ADD, DEL, SEQ_MASK, Counts, Streams, merged
from ksym_plugin.timeline.symbols import Loss

CPUS = 2


class Probe:
    """Numbers and counts as bpf/ksym_events.c does; ``lost`` are the stamps of what it dropped."""

    def __init__(self, seq=0):
        self.seq = {(kind, cpu): seq for kind in (ADD, DEL) for cpu in range(CPUS)}
        self.dropped = dict.fromkeys(self.seq, 0)
        self.lost = []

    def tell(self, kind, cpu, stamp, passes):
        self.seq[kind, cpu] += 1
        if not passes:
            self.dropped[kind, cpu] += 1
            self.lost.append(stamp)
            return None
        return Told(kind, cpu, self.seq[kind, cpu] & SEQ_MASK, stamp)

    def counts(self):
        return [
            [Counts(self.seq[kind, cpu], self.dropped[kind, cpu], 0) for cpu in range(CPUS)]
            for kind in (ADD, DEL)
        ]


class Told:
    """What of a record matters here."""

    def __init__(self, kind, cpu, seq, stamp):
        self.kind, self.cpu, self.seq, self.stamp = kind, cpu, seq, stamp


def compared(streams, probe, now):
    return streams.compare(probe.counts(), now, now)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["drain", "tick", "pass", "pass", "drop"]),
        st.sampled_from([ADD, DEL]),
        st.integers(0, CPUS - 1),
    ),
    max_size=80,
)


@given(EVENTS, st.sampled_from([0, SEQ_MASK - 3]))
def test_each_loss_is_counted_once_and_lies_in_its_gap(events, first):
    probe = Probe(first)
    streams = Streams(probe.counts(), 0)
    losses, ring, now = [], [], 0
    for what, kind, cpu in [*events, ("drain", 0, 0), ("tick", 0, 0)]:
        now += 10
        if what in ("pass", "drop"):
            record = probe.tell(kind, cpu, now, what == "pass")
            ring += [record] if record else []
            continue
        noted = [streams.note(record) for record in ring]
        losses += [loss for loss in noted if loss]
        ring.clear()
        if what == "tick":
            losses += compared(streams, probe, now)
    assert sum(loss.count for loss in losses) == len(probe.lost)
    assert all(loss.since <= loss.until for loss in losses)
    for stamp in probe.lost:
        assert any(loss.since <= stamp <= loss.until for loss in losses)
    # And nothing is left over for the next tick.
    assert compared(streams, probe, now + 10) == []


def test_a_gap_lies_between_its_neighbours():
    probe = Probe()
    streams = Streams(probe.counts(), 0)
    assert streams.note(probe.tell(ADD, 1, 10, True)) is None
    probe.tell(ADD, 1, 20, False)
    assert streams.note(probe.tell(DEL, 1, 30, True)) is None
    loss = streams.note(probe.tell(ADD, 1, 40, True))
    assert (loss.since, loss.until, loss.count) == (10, 40, 1)


def test_a_quiet_stream_bounds_a_later_gap_by_the_tick_before():
    probe = Probe()
    streams = Streams(probe.counts(), 0)
    streams.note(probe.tell(ADD, 0, 10, True))
    assert compared(streams, probe, 5000) == []
    probe.tell(ADD, 0, 6000, False)
    (loss,) = compared(streams, probe, 7000)
    assert (loss.since, loss.until, loss.count) == (5000, 7000, 1)


def test_a_loss_after_the_count_and_before_it_was_known_is_in_the_next_gap():
    probe = Probe()
    streams = Streams(probe.counts(), 0)
    probe.tell(ADD, 0, 500, False)
    counted = probe.counts()
    probe.tell(ADD, 0, 1500, False)
    (first,) = streams.compare(counted, 1000, 2000)
    (second,) = compared(streams, probe, 3000)
    assert (first.since, first.until, first.count) == (0, 2000, 1)
    assert (second.since, second.until, second.count) == (1000, 3000, 1)


def test_records_from_before_the_base_show_no_loss():
    probe = Probe()
    early = [probe.tell(ADD, 0, stamp, True) for stamp in (1, 2, 3)]
    streams = Streams(probe.counts(), 4)
    assert [streams.note(record) for record in early] == [None] * 3
    assert streams.note(probe.tell(ADD, 0, 5, True)) is None


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(1, 9))))
def test_merging_keeps_every_instant_and_every_count(windows):
    losses = [Loss(since, since + length, "full", count) for since, length, count in windows]
    found = merged(losses)
    assert sum(loss.count for loss in found) == sum(loss.count for loss in losses)
    covered = {t for loss in losses for t in range(loss.since, loss.until + 1)}
    assert {t for loss in found for t in range(loss.since, loss.until + 1)} == covered
    assert all(one.until < two.since for one, two in zip(found, found[1:]))

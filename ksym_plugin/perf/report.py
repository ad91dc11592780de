"""The samples of a perf.data by BPF program, without perf.

The history says which frames are BPF's, and whose. Where perf's own name of a frame would
count beside it (``namer.weigh``), there is no such name here: DataError then leaves the
whole file to perf's text, so that both count alike.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left

from ksym_plugin.history import locate
from ksym_plugin.perf import session
from ksym_plugin.perf.data import DataError
from ksym_plugin.perf.data_samples import DataSamples
from ksym_plugin.perf.namer import LEFT_TO_PERF, format_name
from ksym_plugin.perf.output import say
from ksym_plugin.perf.samples import HYPERVISOR, MARKERS, USER, USER_DEFERRED, frames
from ksym_plugin.perf.samples import KERNEL as IN_KERNEL
from ksym_plugin.stacks.account import ELSEWHERE, KERNEL, Account
from ksym_plugin.timeline.resolver import FIRST_MARKER, Locator, Resolver
from ksym_plugin.timeline.symbols import BPF_MODULE, EXACT, GAP, GRACE, UNKNOWN_ADDRESS, Reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ksym_plugin.perf.data_events import Layout
    from ksym_plugin.perf.samples import Sample
    from ksym_plugin.perf.session import Session
    from ksym_plugin.timeline.symbols import Lifetime

    #: What counts of a callchain: how many frames are the kernel's; the numbers in the account,
    #: leaf first, of the leaf and of what may be BPF's; place and address of those of them that
    #: the time decides.
    Chain = tuple[int, list[int], list[tuple[int, int]]]

#: perf drops a callchain with any other (thread__resolve_callchain_sample in util/machine.c).
_TAKEN = frozenset((*(MARKERS[region] for region in (IN_KERNEL, USER, HYPERVISOR)), USER_DEFERRED))
_USER_MARKER = MARKERS[USER].to_bytes(8, sys.byteorder)
#: What counts of a callchain without a kernel part.
_OF_THE_USER = _USER_MARKER + bytes(8)
#: In each word that is as high as markers are.
_LIKE_A_MARKER = b"\xff" * 6
#: How many bytes of callchains are kept.
_MOST_KEPT = 1 << 23
#: perf script prints so many frames (PERF_MAX_STACK_DEPTH in linux/perf_event.h).
_DEEPEST = 127
#: Times are signed in a history.
_END_OF_TIME = 1 << 63


def read(path: str, history: locate.Choice, clock: str | None) -> list[dict[str, Any]]:
    """``Account.documents`` of a perf.data; what a user must know of it is said.

    DataError if perf has to read it, KsymError if there is a history that cannot be used.
    """
    if not os.path.isfile(path):  # What comes through a pipe can be read once.
        raise DataError("it is no regular file")
    if os.stat(path).st_uid not in (0, os.geteuid()):  # perf's rule, and perf says so.
        raise DataError("it is another user's")
    if locate.find(history, path) is None:
        raise DataError("without a history perf's names count")
    with (
        DataSamples(path) as samples,
        session.open_session(history, path, samples.recorded, clock) as known,
    ):
        counter = _Counter(known, clock)
        for sample in samples.samples():
            counter.add(sample)
        if samples.unknown:
            raise DataError("some of its samples are of no event that it has")
        if counter.was_freed_in(samples.kernel_maps):
            raise DataError("where programs have gone perf may know of other code")
        if samples.lost:
            say(f"perf record lost {samples.lost:,} records")
        for line in counter.lines():
            say(line)
        return counter.account.documents()


class _Counter:
    """Counts samples by who was where when they were taken."""

    def __init__(self, known: Session, clock: str | None) -> None:
        """DataError if the history leaves some of it to perf's names."""
        if known.history is None or known.history.losses:
            raise DataError("the history does not know all that was there, so perf's names count")
        self._history = known.history
        self.account = Account()
        #: Where programs were seen after their unload.
        self._freed: set[int] = set()
        self._grace = 0
        self._kernel_frames = 0
        self._bpf = 0
        self._unknown: dict[str, int] = {}
        self._clock_map = self._history.clock_map()
        self._clock = clock
        self._clocks: dict[Layout, str] = {}
        self._resolver = Resolver(self._history)
        self._locator = Locator(known.lines)
        self._chains: dict[bytes, Chain] = {}
        self._kept = 0
        #: Addresses that neither BPF nor a module ever had.
        self._fixed: set[int] = set()
        self._numbers: dict[tuple[Lifetime | None, int, str, bool], int] = {}
        #: By address, and whether it is a leaf: from when to when it is the frame of a number.
        self._holding: dict[tuple[int, bool], tuple[int, int, int]] = {}

    def add(self, sample: Sample) -> None:
        """Count a sample. DataError if perf has to name one of its frames."""
        key = _counting(sample.callchain)
        chain = self._chains.get(key)
        if chain is None:
            chain = self._chains[key] = self._take_in(key, sample)
        kernel_frames, pieces, passing = chain
        if kernel_frames:
            self._kernel_frames += kernel_frames
            time_ns = self._time(sample)
            if passing:
                pieces = pieces.copy()
                for place, address in passing:
                    pieces[place] = self._piece(address, time_ns, not place)
        self.account.add(sample.event.name, sample.comm, pieces)

    def was_freed_in(self, maps: list[tuple[int, int]]) -> bool:
        """Whether a program was seen after its unload in one of these ranges."""
        freed = sorted(self._freed)
        places = ((bisect_left(freed, start), end) for start, end in maps)
        return any(at < len(freed) and freed[at] < end for at, end in places)

    def lines(self) -> list[str]:
        """What became of the kernel frames, a line a fact."""
        summary = (
            f"{self._kernel_frames:,} kernel frames: {self._bpf:,} are BPF by the history,"
            f" {self._grace:,} of them ran after their unload (grace)"
        )
        ranked = sorted(self._unknown.items(), key=lambda item: -item[1])
        return [summary, *(f"{count:,} unknown: {why}" for why, count in ranked)]

    def _take_in(self, callchain: bytes, sample: Sample) -> Chain:
        """A callchain that was not met before."""
        self._kept += len(callchain)
        if self._kept > _MOST_KEPT:
            self._chains.clear()
            self._kept = len(callchain)
        depth, pieces, passing = 0, list[int](), list[tuple[int, int]]()
        for address, region in _frames(callchain):
            if region == USER:
                pieces += [] if depth else [ELSEWHERE]
                break
            if region != IN_KERNEL:
                raise DataError("perf tells the kernel of a virtual machine from this one")
            if not self._is_fixed(address, sample):
                passing.append((len(pieces), address))
                pieces.append(KERNEL)
            elif not depth:
                pieces.append(KERNEL)
            depth += 1
        if depth > _DEEPEST:
            raise DataError("perf leaves out what is deeper in a callchain")
        return depth, pieces, passing

    def _is_fixed(self, address: int, sample: Sample) -> bool:
        if address in self._fixed:
            return True
        if self._resolver.resolve(address, self._time(sample)) is not UNKNOWN_ADDRESS:
            return False
        self._fixed.add(address)
        return True

    def _time(self, sample: Sample) -> int:
        """When a sample was taken, CLOCK_MONOTONIC ns; the history covers it."""
        clock = self._clocks.get(sample.event)
        if clock is None:
            clock = self._clock or sample.event.clock
            if clock is None or not self._clock_map.knows(clock):
                raise DataError("the history cannot place its times, so perf's names count")
            self._clocks[sample.event] = clock
        if sample.time is None:
            raise DataError("samples without a time have perf's names")
        time_ns = self._clock_map.to_monotonic(clock, sample.time)
        if not 0 < time_ns < _END_OF_TIME or not self._history.covers(time_ns):
            raise DataError("where the history does not reach perf's names count")
        return time_ns

    def _piece(self, address: int, time_ns: int, is_leaf: bool) -> int:
        """The number of a frame that the time decides."""
        since, until, held = self._holding.get((address, is_leaf), (0, -1, 0))
        if since <= time_ns <= until:
            self._bpf += 1
            return held
        answer = self._resolver.resolve(address, time_ns)
        if isinstance(answer, Reason):
            if answer in LEFT_TO_PERF:
                raise DataError(f"perf's names count: {answer.text}")
            self._unknown[answer.text] = self._unknown.get(answer.text, 0) + 1
            return KERNEL
        if answer.module != BPF_MODULE:
            return KERNEL
        if answer.certainty == GAP:
            raise DataError("where changes may have been lost perf's names count")
        self._bpf += 1
        if answer.certainty == GRACE:
            self._grace += 1
            self._freed.add(address)
        key = answer.lifetime, address, answer.certainty, is_leaf
        number = self._numbers.get(key)
        if number is None:
            frame = self._locator.locate(answer, is_leaf)
            number = self._numbers[key] = self.account.frame(format_name(answer), frame)
        if answer.certainty == EXACT:
            until = self._history.holds_until(address, answer.lifetime)
            self._holding[address, is_leaf] = time_ns, until, number
        return number


def _counting(callchain: bytes) -> bytes:
    """The part of a callchain that counts: of the user's, only that it is the user's.

    All of it where perf may drop it.
    """
    if callchain.startswith(_USER_MARKER):
        return _OF_THE_USER
    end = callchain.find(_USER_MARKER)
    if end > 8 and not end % 8 and _LIKE_A_MARKER not in callchain[end + 8 :]:
        return callchain[:end]
    return callchain


def _frames(callchain: bytes) -> tuple[tuple[int, str], ...]:
    """Address and region of the frames that perf takes: the leaf alone, of what it drops."""
    found = frames(callchain)
    for word in memoryview(callchain).cast("Q"):
        if word >= FIRST_MARKER and word not in _TAKEN:
            return found[:1]
    return found

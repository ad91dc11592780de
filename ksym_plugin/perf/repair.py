"""Addresses that are left in folded stacks, under the names they should have.

A folded stack has no time. So an address is named only if the history has a single answer
for it, at whatever time. Everything else stays as it is.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate, chain
from math import inf

from ksym_plugin.perf.fold import format_function
from ksym_plugin.perf.namer import format_name
from ksym_plugin.stacks.names import encode_name
from ksym_plugin.timeline.index import AddressIndex
from ksym_plugin.timeline.resolver import FIRST_MARKER, Resolver, named
from ksym_plugin.timeline.symbols import EXACT, Frame, Reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Union

    from ksym_plugin.history.reader import BootHistory
    from ksym_plugin.kernel.kallsyms import Kallsyms
    from ksym_plugin.timeline.symbols import Lifetime

    Found = Union[Frame, Reason]

#: ``ffffffff81000404``, ``0xffffffff81000404``, ``[unknown <ffffffff81000404>]``, and what
#: may follow; the upper half of the address space is the kernel's. Some tools write blanks
#: before each frame.
_ADDRESS = re.compile(
    rb"([ \t]*)(?:(?:0[xX])?([89a-fA-F][0-9a-fA-F]{15})"
    rb"|\[[^<>]*<(?:0[xX])?([89a-fA-F][0-9a-fA-F]{15})>\])((?:_\[[kbij]\])?[ \t]*)"
)
#: A kernel frame that was folded under its file's name alone.
_FILE_ONLY = re.compile(rb"\[\[[^<>]*\]\](?:_\[k\])?|\[[^<>]*\]_\[k\]")
_NUMBER = re.compile(rb"[0-9]+\.?[0-9]*")
_SEVERAL = Reason("several programs were at this address one after the other")
_MOST = 1 << 16
#: A time that nothing covers.
_NO_TIME = -1


class Repairer:
    """Folded text in, a line at a time, the same text out. ``tally`` says what was done.

    At ``time_ns`` (CLOCK_MONOTONIC) if that is given. Without ``kallsyms`` only BPF symbols
    have names.
    """

    def __init__(
        self, history: BootHistory, kallsyms: Kallsyms | None = None, time_ns: int | None = None
    ) -> None:
        self._history = history
        self._time = time_ns
        self._resolver = Resolver(history, kallsyms)
        self._answers: dict[int, Found] = {}
        #: All lifetimes, read once they are wanted.
        self._index: AddressIndex | None = None
        self.stacks = 0
        self.named = 0
        self.without_address = 0
        self.unnamed: dict[str, int] = {}
        self.unparsed = 0

    def line(self, line: bytes) -> bytes:
        """A line of folded text, with or without its line end, as it should be."""
        stack, number = _split(line)
        if not number:
            if line.strip() and not line.startswith(b"#"):
                self.unparsed += 1
            return line
        self.stacks += 1
        frames = stack.split(b";")
        repaired = [self._frame(frame) for frame in frames]
        return line if repaired == frames else b";".join(repaired) + number

    def tally(self) -> list[str]:
        """What became of the addresses, a line a fact."""
        left = sum(self.unnamed.values())
        lines = [f"{self.stacks:,} stacks: {self.named:,} addresses named, {left:,} left"]
        lines += [
            f"{count:,} left: {why}"
            for why, count in sorted(self.unnamed.items(), key=lambda item: -item[1])
        ]
        if _SEVERAL.text in self.unnamed:
            lines.append("say which of them with --at TIME")
        if self.without_address:
            lines.append(
                f"kernel frames without an address: {self.without_address:,} (fold with --addrs)"
            )
        if self.unparsed:
            lines.append(f"{self.unparsed:,} lines are no stacks with a count; left as they are")
        return lines

    def _frame(self, frame: bytes) -> bytes:
        found = _ADDRESS.fullmatch(frame)
        if found is None:
            self.without_address += _FILE_ONLY.fullmatch(frame) is not None
            return frame
        address = int(found[2] or found[3], 16)
        if address >= FIRST_MARKER:
            return frame
        answer = self._answer(address)
        if isinstance(answer, Frame):
            self.named += 1
            return found[1] + format_function(encode_name(format_name(answer))) + found[4]
        self.unnamed[answer.text] = self.unnamed.get(answer.text, 0) + 1
        return frame

    def _answer(self, address: int) -> Found:
        answer = self._answers.get(address)
        if answer is None:
            if len(self._answers) >= _MOST:
                self._answers.clear()
            if self._time is not None:
                answer = self._resolver.resolve(address, self._time)
            else:
                answer = self._at_any_time(address)
            self._answers[address] = answer
        return answer

    def _at_any_time(self, address: int) -> Found:
        """The only symbol that was ever at an address, as far as the history goes."""
        only: Found | None = None
        for lifetime in self._reaching(address):
            found = named(address, lifetime, EXACT)
            if only is not None and _name(only) != _name(found):
                return _SEVERAL
            only = found
        return self._resolver.resolve(address, _NO_TIME) if only is None else only

    def _reaching(self, address: int) -> Iterator[Lifetime]:
        """Every lifetime that can have had an address."""
        if self._index is None:
            self._index = AddressIndex()
            for lifetime in self._history.lifetimes():
                self._index.insert(lifetime)
        index = self._index
        for bucket in index.buckets_at(address):
            found = [one for one in bucket.lifetimes if _is_over(one, address)]
            if found and found[0].open_ended:
                # What was loaded beside an image lies behind its true end.
                start = found[0].symbol.start
                beside = _Neighbours(chain(*index.starting_between(start + 1, address)))
                found = [image for image in found if not beside.coexisted(image)]
            yield from found


def _is_over(lifetime: Lifetime, address: int) -> bool:
    return lifetime.symbol.start <= address < lifetime.symbol.end


def _name(found: Found) -> tuple[int, str] | Reason:
    """What an answer is compared by."""
    return (found.address - found.offset, found.name) if isinstance(found, Frame) else found


class _Neighbours:
    """Lifetimes, to be asked whether any of them was surely there together with another."""

    __slots__ = ("_loads", "_unloads")

    def __init__(self, lifetimes: Iterable[Lifetime]) -> None:
        spans = sorted((lifetime.loaded_latest, _end(lifetime)) for lifetime in lifetimes)
        self._loads = [load for load, _ in spans]
        #: The last unload of all that were loaded no later.
        self._unloads = list(accumulate((unload for _, unload in spans), max))

    def coexisted(self, lifetime: Lifetime) -> bool:
        before = bisect_right(self._loads, _end(lifetime))
        return before > 0 and self._unloads[before - 1] >= lifetime.loaded_latest


def _end(lifetime: Lifetime) -> float:
    """Until when it was surely there."""
    return inf if lifetime.unloaded_earliest is None else lifetime.unloaded_earliest


def _split(line: bytes) -> tuple[bytes, bytes]:
    """A stack, and the rest of the line unchanged: its count and the blanks around it."""
    words = line.rsplit(None, 1)
    if len(words) != 2 or line[:1] == b"#" or not _NUMBER.fullmatch(words[1]):
        return line, b""
    stack = words[0]
    earlier = stack.rsplit(None, 1)
    # The two counts of a difference of profiles, behind an address.
    is_double = len(earlier) == 2 and _NUMBER.fullmatch(earlier[1]) is not None
    if is_double and _ADDRESS.fullmatch(earlier[0].rpartition(b";")[2]):
        stack = earlier[0]
    return stack, line[len(stack) :]

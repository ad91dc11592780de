"""Decides what a kernel frame is called: perf's own name against what was recorded.

perf's name stands unless what was recorded says otherwise; that knows when each program was
there, and perf may not. ``timeline.resolver`` says who was at an address, and this module alone
weighs it against what perf said, whichever way samples are read.
"""

from __future__ import annotations

from functools import lru_cache

from ksym_plugin.timeline.resolver import Resolver
from ksym_plugin.timeline.symbols import (
    AMBIGUOUS,
    AMONG_BPF,
    BETWEEN,
    BPF_MODULE,
    EXACT,
    GAP,
    GRACE,
    KERNEL,
    LOST,
    MODULE,
    NOT_LOADED,
    OTHER_BPF,
    OUTSIDE_HISTORY,
    UNKNOWN_ADDRESS,
    VACANT,
    Frame,
    Reason,
    Symbol,
    bpf_kind,
    split_bpf_name,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Optional, Union

    from ksym_plugin.timeline.resolver import Locator, Lookup, Statics
    from ksym_plugin.timeline.symbols import Lifetime

    #: What a frame is called: by what was recorded, or by perf, or it has no name.
    Decision = Union[Frame, str, None]
    HoldsUntil = Callable[[int, Optional[Lifetime]], int]
    #: The running system, asked for once and only if a frame wants it.
    Running = Callable[[], tuple[Optional[Lookup], Optional[Statics]]]

#: The dso of the core image, as perf writes it.
KERNEL_DSO = "[kernel.kallsyms]"
#: Appended to a name that may be wrong because changes were lost around that time.
UNCERTAIN = "?"
#: Why an address among BPF code has no symbol: what is there is BPF's, if it is no module's.
_UNNAMED_BPF = (AMONG_BPF, NOT_LOADED)
#: Where what was recorded is silent, or not sure, perf's name counts.
LEFT_TO_PERF = (*_UNNAMED_BPF, LOST, OUTSIDE_HISTORY)
#: What the kernel announces to perf as it does BPF, and not to most of a history's sources:
#: copies of what kprobes are on, and ftrace's trampolines (``perf_event_ksymbol``).
OUT_OF_LINE = ("kprobe_insn_page", "kprobe_optinsn_page", "ftrace_trampoline")
_CONTRADICTED = "the running system was not asked: perf's own names are not this kernel's"
_NOT_SHOWN = (
    "the running system was not asked: nothing in the text shows that it is of this boot"
    " (name a history with -H)"
)
#: How many of perf's names of the core image are compared with the running kernel's table, to
#: tell whether samples are of this boot.
_MOST_COMPARED = 64
#: Of how many frames it is kept what was decided.
_MOST_KEPT = 1 << 15
_NOTHING_KEPT: tuple[int, int, tuple[Decision, str]] = (0, -1, (None, ""))
#: Of how many of perf's names it is kept whether they are BPF's.
_MOST_NAMES = 1 << 12
#: In less than this, in ns, nothing is loaded and unloaded again.
_MOMENT = 10_000
#: What is so at all times.
_FIXED = (UNKNOWN_ADDRESS, AMONG_BPF, OUTSIDE_HISTORY)
#: The certainties of names that are not marked, by how doubtful they are.
_UNMARKED = {EXACT: 0, GRACE: 1}
#: How many different errors are counted, and how much is kept of the text of each.
_MOST_ERRORS = 16
_LONGEST_ERROR = 100
#: Why a frame keeps perf's name, marked, or has none: text does not tell the time in full, or
#: the clock was set about then.
COARSE = Reason("two symbols followed each other here within what is known of the time")


class Tally:
    """What became of the kernel frames, and why some have no name.

    ``coarse`` frames are perf's where the time is not known well enough. ``unparsed`` lines are
    of text alone, ``errors`` of samples alone.
    """

    def __init__(self) -> None:
        self.confirmed = 0
        self.added = 0
        self.renamed = 0
        self.withdrawn = 0
        #: BPF frames as perf had them, which the history cannot vouch for.
        self.unverified = 0
        self.bpf = 0
        self.grace = 0
        self.gap = 0
        self.coarse = 0
        self.unparsed = 0
        self.unknown: dict[str, int] = {}
        self.errors: dict[str, int] = {}

    def count(self, frame: Frame, name: str) -> None:
        """Count a frame that has its symbol's name, and for which perf had ``name``."""
        if not name:
            self.added += 1
        elif name == frame.name:
            self.confirmed += 1
        else:
            self.renamed += 1
        if frame.module == BPF_MODULE:
            self.bpf += 1
            self.grace += frame.certainty == GRACE
            self.gap += frame.certainty == GAP

    @property
    def frames(self) -> int:
        named = self.confirmed + self.added + self.renamed + self.unverified + self.coarse
        return named + sum(self.unknown.values())

    def lines(self) -> list[str]:
        """The tally as text, a line a fact; what did not happen is left out."""
        summary = (
            f"{self.frames:,} kernel frames: {self.confirmed:,} confirmed, {self.renamed:,} renamed"
            f" (perf had them wrong), {self.added:,} newly named (perf had missed them),"
            f" {sum(self.unknown.values()):,} still unknown"
        )
        uncertain = f"{self.gap:,} uncertain (marked {UNCERTAIN})"
        silent = "nothing that was recorded tells who was there"
        refuted = "a name from perf that does not hold, or cannot be verified"
        ranked = sorted(self.unknown.items(), key=lambda item: -item[1])
        facts = [
            (
                self.bpf,
                f"of them are BPF: {self.grace:,} ran after their unload (grace), {uncertain}",
            ),
            (self.unverified, f"BPF frames are as perf had them, unverified: {silent}"),
            *((count, f"unknown: {why}") for why, count in ranked),
            (self.withdrawn, f"of the unknown had {refuted}"),
            *((count, f"samples {what}") for what, count in sorted(self.errors.items())),
            (self.coarse, f"are as perf had them, marked {UNCERTAIN}: {COARSE.text}"),
            (self.unparsed, "lines are neither header nor frame; left as they are"),
        ]
        return [summary, *(f"{count:,} {fact}" for count, fact in facts if count)]

    def add(self, other: Tally) -> None:
        """Take in the tally of another part of the same samples."""
        for count, value in vars(other).items():
            if isinstance(value, dict):
                mine = getattr(self, count)
                for what, number in value.items():
                    mine[what] = mine.get(what, 0) + number
            else:
                setattr(self, count, getattr(self, count) + value)

    def failed(self, outcome: str, error: Exception) -> None:
        """A sample that could not be read as it should; ``outcome`` is what became of it."""
        what = f"{outcome}: {type(error).__name__}: {str(error)[:_LONGEST_ERROR]}"
        if what not in self.errors and len(self.errors) >= _MOST_ERRORS:
            what = f"{outcome}: other errors"
        self.errors[what] = self.errors.get(what, 0) + 1


@lru_cache(_MOST_NAMES)
def is_bpf_name(name: str, dso: str) -> bool:
    """Whether perf's answer claims a BPF program: its name, or its own name as its dso."""
    is_announced = dso == name and name not in OUT_OF_LINE
    return split_bpf_name(name) is not None or dso == BPF_MODULE or is_announced


def is_neighbour(name: str, dso: str) -> bool:
    """Whether perf may have given a frame the name of the BPF symbol before it.

    perf does so where it reads kcore, as kallsyms tells no lengths, and for images, whose
    records always say 4096 bytes. Only a program's record tells its true length; for programs
    of users without CAP_BPF perf has nothing but that record.
    """
    is_announced = split_bpf_name(name) is not None and dso == name
    return bool(name) and not is_announced and bpf_kind(name) != OTHER_BPF


def is_core(dso: str) -> bool:
    """Whether perf found a name in the core image, which stays where it is."""
    return dso == KERNEL_DSO or "/vmlinux" in dso


def is_module(dso: str) -> bool:
    """Whether perf found a name in a module."""
    if dso.startswith("["):
        return not is_core(dso) and dso != BPF_MODULE and not dso.startswith(("[guest", "[__"))
    return ".ko" in dso.rpartition("/")[2]


def weigh(
    answer: Frame | Reason, name: str, dso: str, tally: Tally, has_modules: bool = False
) -> Frame | str | None:
    """The frame that holds, or perf's ``name`` where that stands, or None for no name.

    ``has_modules`` says that the history knows modules as well, and not only BPF.
    """
    is_bpf = is_bpf_name(name, dso)
    if isinstance(answer, Frame):
        if name and _stands(answer, name, dso, is_bpf):
            tally.confirmed += 1
            return name
        tally.count(answer, name)
        return answer
    if name and answer is LOST and is_bpf:
        tally.unverified += 1
        return name + UNCERTAIN
    is_gone = answer in (NOT_LOADED, VACANT, AMBIGUOUS)
    comes_and_goes = is_bpf or (has_modules and is_module(dso))
    is_refuted = (
        answer is BETWEEN
        or (is_gone and comes_and_goes)
        or (answer in _UNNAMED_BPF and is_neighbour(name, dso))
    )
    if name and not is_refuted:
        tally.unverified += is_bpf
        tally.confirmed += not is_bpf
        return name
    tally.withdrawn += bool(name)
    if answer in _UNNAMED_BPF and unnamed_dso(answer, name, dso) != BPF_MODULE:
        answer = UNKNOWN_ADDRESS  # A module's function that the static tables lack.
    tally.unknown[answer.text] = tally.unknown.get(answer.text, 0) + 1
    return None


def _stands(frame: Frame, name: str, dso: str, is_bpf: bool) -> bool:
    """Whether perf's name stands although a symbol was there."""
    lifetime = frame.lifetime
    if frame.kind == MODULE and lifetime is not None:
        # It is one of those that the function has.
        functions = lifetime.functions
        at = frame.address - lifetime.symbol.start
        return functions is not None and name in functions.names(at)
    # perf prefers another alias of the symbol; or it knows of a module where a program was
    # that has gone.
    has_gone = frame.certainty != EXACT and not is_core(dso)
    return not is_bpf and (frame.module != BPF_MODULE or has_gone)


class Namer:
    """Decides what the kernel frames of samples are called, and counts what becomes of them.

    ``lookup`` tells who was where, when. ``running`` gives that of the running system and what
    does not change in it, for frames that still have no name. It is used only as long as perf's
    own names do not contradict it, and with ``doubt`` only if one agrees.
    """

    def __init__(
        self, lookup: Lookup | None = None, running: Running | None = None, doubt: bool = False
    ) -> None:
        self.tally = Tally()
        #: Why the running system is not used, if so.
        self.problem = ""
        self._lookup = lookup
        self._running = running
        self._doubt = doubt
        self._has_modules = lookup is not None and lookup.has_modules
        self._resolver = Resolver(lookup)
        #: Offsets in their functions, by perf, of addresses of the core image.
        self._compared: dict[int, int] = {}
        #: Until when an address is a lifetime's, where the lookup tells (BootHistory does).
        self._holds_until: HoldsUntil | None = getattr(lookup, "holds_until", None)
        #: By address and perf's name and dso: from when to when a decision holds, and what it
        #: is. Samples come in the order of time.
        self._kept: dict[tuple[int, str, str], tuple[int, int, tuple[Decision, str]]] = {}

    def decide(
        self, address: int, window: tuple[int, int], name: str, dso: str, offset: int | None
    ) -> tuple[Decision, str]:
        """What a frame is called, and the dso that is printed of it, which may be empty.

        The sample was taken in ``window``: its first and last ns (CLOCK_MONOTONIC). Where two
        symbols were there in that time, perf's name is marked. ``name``, ``dso`` and ``offset``
        are perf's, empty and None where it has none.
        """
        key = address, name, dso
        since, until, decided = self._kept.get(key, _NOTHING_KEPT)
        if since <= window[0] and window[1] <= until:
            self.count_again(decided[0], name)
            return decided
        answer = self._answer(address, window, name, dso, offset)
        if answer is COARSE and name:
            self.tally.coarse += 1
            return name.rstrip(UNCERTAIN) + UNCERTAIN, dso
        decision = weigh(answer, name, dso, self.tally, self._has_modules)
        if isinstance(decision, Frame):
            dso = format_dso(decision, dso)
        elif decision is None:
            dso = unnamed_dso(answer, name, dso)
        if self._holds_until and isinstance(answer, Frame) and answer.certainty == EXACT:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            until = self._holds_until(address, answer.lifetime)
            self._kept[key] = window[0], until, (decision, dso)
        return decision, dso

    def kept_until(self, address: int, name: str, dso: str, time: int) -> int:
        """Until when what was decided of a frame at ``time`` holds; -1 if unknown.

        CLOCK_MONOTONIC ns. What is kept may be of a later time: text can be out of order.
        """
        since, until, _ = self._kept.get((address, name, dso), _NOTHING_KEPT)
        return until if since <= time else -1

    def count_again(self, decision: Decision, name: str) -> None:
        """Count a frame of which the same was decided as before, for perf's ``name``."""
        if isinstance(decision, Frame):
            self.tally.count(decision, name)
        else:
            self.tally.confirmed += 1

    def is_fixed(
        self, address: int, window: tuple[int, int], name: str, dso: str, offset: int | None
    ) -> bool:
        """Whether perf's name of a frame, or that it has none, holds at all times.

        perf's name stands for the core image. Nameless is an address of which neither the
        lookup nor the running system knows anything.
        """
        self._note(address, name, dso, offset)
        if is_bpf_name(name, dso) or (not name and self._running is not None):
            return False
        answer = resolve_within(self._resolver, address, window)
        if name and answer is AMONG_BPF:
            return not is_neighbour(name, dso)
        if name and isinstance(answer, Frame):
            return answer.module is None
        return answer is UNKNOWN_ADDRESS

    def forget(self) -> None:
        """Decide all anew: a history that is being written has more, such as a loss of before."""
        self._kept.clear()

    def report(self) -> list[str]:
        """The tally as text, and why the running system was not asked."""
        return [*self.tally.lines(), *([self.problem] if self.problem else [])]

    def _answer(
        self, address: int, window: tuple[int, int], name: str, dso: str, offset: int | None
    ) -> Frame | Reason:
        """Who was there; the running system is asked too, if the frame wants a name."""
        self._note(address, name, dso, offset)
        answer = resolve_within(self._resolver, address, window)
        is_wanting = not name or is_bpf_name(name, dso)
        if self._running is not None and is_wanting and isinstance(answer, Reason):
            self._ask(self._running)
            answer = resolve_within(self._resolver, address, window)
        return answer

    # The running system

    def _note(self, address: int, name: str, dso: str, offset: int | None) -> None:
        """Note where a function of the core image begins, by perf."""
        is_in_core = name and offset is not None and is_core(dso) and not is_bpf_name(name, dso)
        if self._running is not None and is_in_core and len(self._compared) < _MOST_COMPARED:
            self._compared[address] = offset or 0

    def _ask(self, running: Running) -> None:
        if self._doubt and not self._compared:
            self.problem = _NOT_SHOWN
            return
        self._running, self.problem = None, ""
        lookup, statics = running()
        if statics is None:  # There was a message that says why.
            return
        # For how many more of perf's names than not the table has the same start of the function.
        starts = ((statics.find(at), at - offset) for at, offset in self._compared.items())
        agree = [isinstance(found, Symbol) and found.start == start for found, start in starts]
        agreeing = 2 * sum(agree) - len(agree)
        if agreeing < 0:
            self.problem = _CONTRADICTED
        elif self._doubt and not agreeing:
            self.problem = _NOT_SHOWN
        else:
            self._resolver = Resolver(self._lookup or lookup, statics)


def resolve_within(resolver: Resolver, address: int, window: tuple[int, int]) -> Frame | Reason:
    """The answer that holds from the first to the last instant; COARSE if there are two."""
    since, until = window
    first = resolver.resolve(address, since)
    if since == until:
        return first
    last = resolver.resolve(address, until)
    if isinstance(first, Frame) and isinstance(last, Frame):
        # Who was there at both ends was there in between; one of the same name need not be.
        is_one = first.lifetime is last.lifetime
        if first.lifetime is None and until - since >= _MOMENT:
            # The static tables' answer, which is one object if it holds at all times.
            is_one = first is last
        if is_one and first.name == last.name and first.offset == last.offset:
            return max(first, last, key=lambda frame: _UNMARKED.get(frame.certainty, 2))
        return COARSE
    # Somebody may have come and gone meanwhile.
    is_fixed = first in _FIXED or until - since < _MOMENT
    return first if first is last and is_fixed else COARSE


def located(
    locator: Locator, address: int, offset: int | None, decision: Decision, dso: str, is_leaf: bool
) -> Frame | None:
    """A frame with its source location, or what it traces; None if neither is known.

    ``offset`` is perf's, and ``dso`` what is printed.
    """
    if isinstance(decision, Frame):
        return locator.locate(decision, is_leaf)
    if decision is None or not is_core(dso):
        return None
    location = locator.in_image(address, offset, is_leaf)
    if location is None:
        return None
    return Frame(address, decision, offset or 0, None, KERNEL, EXACT, None, location)


def unnamed_dso(answer: Frame | Reason, name: str, dso: str) -> str:
    """The dso printed of a frame that keeps no name: BPF's if the code can be no other's."""
    # perf may name a module there whose functions nothing that was recorded tells.
    is_open = bool(name) and not is_module(dso)
    if answer in _UNNAMED_BPF and (is_open or not dso or is_core(dso)):
        return BPF_MODULE
    return "" if name else dso


def format_dso(frame: Frame, dso: str) -> str:
    """The dso that is printed of a frame; ``dso`` is perf's own, which stands for the core image.

    BPF's is ``[bpf]``: readers of perf script's text take what is in brackets for the kernel's.
    """
    if frame.module is None:
        return dso if is_core(dso) else KERNEL_DSO
    return frame.module if frame.module == BPF_MODULE else f"[{frame.module}]"


def format_name(frame: Frame) -> str:
    """The name that is printed of a frame: marked where it is not certain."""
    return frame.name if frame.certainty in _UNMARKED else frame.name + UNCERTAIN

"""What prints samples, and perf script's own text of them.

An output makes a piece of each frame, and takes a sample as its pieces, leaf first; so the
piece of a frame that many samples have can be cached. A piece is the text of a frame, or its
number where stacks are counted.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from functools import lru_cache

from ksym_plugin.stacks.names import file_name, for_terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Protocol, TextIO

    from ksym_plugin.timeline.symbols import Frame

    #: Where files were: first address, end and offset, by name.
    Maps = dict[str, set[tuple[int, int, int]]]
    #: What an output makes of a frame: a str or an int.
    Piece = Any

    class Output(Protocol):
        """What prints samples."""

        def user(self, node: dict[str, Any], /) -> Piece: ...
        def kernel(
            self, at: int, name: str, offset: int | None, dso: str, frame: Frame | None = None, /
        ) -> Piece: ...
        def sample(self, event: dict[str, Any], pieces: list[Piece], /) -> None: ...
        def close(self) -> None: ...


_KERNEL_HALF = 1 << 63
#: perf's sign that samples carry no CPU.
_NO_CPU = 0xFFFF_FFFF
_FLUSH = 1 << 16
#: Where a frame's address ends: after a tab and 16 columns.
_ADDRESS_END = 17
#: How many user addresses without a symbol are cached.
_MOST_PLACES = 1 << 16
_UNKNOWN = "[unknown]"
#: What perf prints for the dso of a function that was inlined into the one below it.
INLINED = "inlined"

#: perf_event_attr: ``type``, ``size``, ``config``, ``sample_period``, ``sample_type``.
_ATTR = struct.Struct("=IIQQQ")
_TYPE_TRACEPOINT = 2
_SAMPLE_TIME = 1 << 2
_SAMPLE_CALLCHAIN = 1 << 5


class TextOutput:
    """``perf script``'s default text.

    BPF frames have ``([bpf])`` for their dso, which readers of this format take for the
    kernel's. Names are printed as they are, as perf does it, but on a terminal without
    control characters. ``width`` is that of the longest name of an event. ``maps`` reads
    ``data.user_maps``, once a user frame has a file and no symbol.

    A frame with a source location has it on a line below, as after ``perf script -F
    +srcline``, and a trampoline what it traces. The text of the source is left out: anyone
    may have written it, also so that it reads as a sample.
    """

    def __init__(self, stream: TextIO, width: int = 0, maps: Callable[[], Maps] = dict) -> None:
        self._stream = stream
        self._read_maps = maps
        self._maps: Maps | None = None
        self._in_file = lru_cache(_MOST_PLACES)(self._place_in_file)
        self._width = width
        self._is_terminal = stream.isatty()
        self._parts: list[str] = []
        self._lines = 0
        self._shapes: dict[bytes, _Shape] = {}
        self._tid_width = 5

    def user(self, node: dict[str, Any], dso: str = "") -> str:
        """A user frame of perf's callchain; perf prints it relative to its file."""
        symbol, offset, dso = node.get("sym"), node.get("sym_off"), dso or node.get("dso") or ""
        if symbol and offset is not None:
            return self.kernel(symbol["start"] + offset, symbol["name"], offset, dso)
        if symbol:
            return self.kernel(node["ip"], symbol["name"], None, dso)
        return self.kernel(self._in_file(node["ip"], dso), "", None, dso)

    def _place_in_file(self, address: int, dso: str) -> int:
        """A user address as perf prints it: within the file, if it is known where that was."""
        if self._maps is None:
            self._maps = self._read_maps()
        places = self._maps.get(dso, ())
        found = {address - start + at for start, end, at in places if start <= address < end}
        return found.pop() if len(found) == 1 else address

    def kernel(
        self, address: int, name: str, offset: int | None, dso: str, frame: Frame | None = None
    ) -> str:
        """A frame; ``name`` is empty and ``offset`` None where they are not known."""
        if self._is_terminal:
            name, dso = for_terminal(name), for_terminal(dso)
        beneath = "" if frame is None else below(frame)
        if not name:
            return f"\t{address:16x} {_UNKNOWN} ({dso or _UNKNOWN})\n"
        if offset is None:
            return f"\t{address:16x} {name} ({dso})\n{beneath}"
        return f"\t{address:16x} {name}+{offset:#x} ({dso})\n{beneath}"

    def sample(self, event: dict[str, Any], pieces: list[str]) -> None:
        attr = event.get("attr") or b""
        shape = self._shapes.get(attr)
        if shape is None:
            shape = self._shapes[attr] = _Shape(attr)
        if "map_pgoff" in event:
            self._tid_width = 7  # The perfs that tell this have wider columns.
        header = _header(event, shape, self._tid_width, self._width)
        if self._is_terminal:
            header = for_terminal(header)
        if shape.has_callchain:
            self._mark_inlined(event.get("callchain") or (), pieces)
            # A chain that could not be taken is empty: perf then prints no frame at all.
            frames = pieces if event.get("callchain") or not shape.is_known else ()
            self._parts += (header, "\n", *frames, "\n")
        elif pieces:  # The only frame stands on the header's line, by its address in memory.
            address = (event.get("sample") or {}).get("ip", 0)
            self._parts += (header, f" {address:16x}", pieces[0][_ADDRESS_END:])
        else:
            self._parts += (header, " \n")
        self._lines += len(pieces) + 1
        if self._lines * 64 >= _FLUSH:
            self._flush()

    def _mark_inlined(self, chain: Sequence[dict[str, Any]], pieces: list[str]) -> None:
        """Print inlined user functions as such: frames with the address of the one below them.

        The last frame with an address is that of the function that is there.
        """
        addresses = [node.get("ip") for node in chain]
        if len({*addresses}) == len(addresses):
            return
        around: object = None
        for at in range(len(chain) - 1, -1, -1):
            node = chain[at]
            name = (node.get("sym") or {}).get("name")
            if addresses[at : at + 1] != addresses[at + 1 : at + 2]:
                around = name
            elif name and name != around and node["ip"] < _KERNEL_HALF:
                pieces[at] = self.user(node, INLINED)

    def close(self) -> None:
        """Print what is not yet printed."""
        self._flush()
        self._stream.flush()

    def _flush(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        self._lines = 0
        write(self._stream, text)


def below(frame: Frame) -> str:
    """What stands below a frame."""
    if frame.location is not None:
        return f"  {file_name(frame.location.file)}:{frame.location.line}\n"
    return "" if frame.traced is None else f"  traces {file_name(frame.traced)}\n"


class _Shape:
    """What perf prints of the samples of an event, by its raw perf_event_attr."""

    __slots__ = ("has_callchain", "has_period", "has_time", "is_known")

    def __init__(self, attr: bytes) -> None:
        kind, sample_type = 0, _SAMPLE_TIME | _SAMPLE_CALLCHAIN
        #: Whether the attr is known; without it a sample is taken to have what most have.
        self.is_known = len(attr) >= _ATTR.size
        if self.is_known:
            kind, _, _, _, sample_type = _ATTR.unpack_from(attr)
        self.has_callchain = bool(sample_type & _SAMPLE_CALLCHAIN)
        self.has_time = bool(sample_type & _SAMPLE_TIME)
        self.has_period = kind != _TYPE_TRACEPOINT


def _header(event: dict[str, Any], shape: _Shape, tid_width: int, width: int) -> str:
    """The header of a sample up to where its frames begin."""
    sample = event.get("sample") or {}
    comm = event.get("comm")
    comm = ":-1" if comm is None else str(comm)
    # perf aligns the name of the task only where no callchain follows.
    comm = comm if shape.has_callchain else comm.rjust(16)
    tid, cpu = sample.get("tid", -1), sample.get("cpu", _NO_CPU)
    tid = tid if tid < 1 << 31 else tid - (1 << 32)
    place = "" if cpu == _NO_CPU else f" [{cpu:03d}]"
    stamp = ""
    if shape.has_time:
        seconds, nanoseconds = divmod(int(sample.get("time") or 0), 1_000_000_000)
        stamp = f" {seconds:5d}.{nanoseconds // 1000:06d}:"
    period = f" {sample.get('period', 1):10d}" if shape.has_period else ""
    return (
        f"{comm} {tid:{tid_width}d}{place}{stamp}{period} {event.get('ev_name', '')!s:>{width}}: "
    )


def write(stream: TextIO, text: str) -> None:
    """Write names, whatever is in them."""
    try:
        stream.write(text)
    except UnicodeEncodeError:  # half a surrogate pair: no bytes can have been decoded to it
        stream.write(text.encode("utf-8", "backslashreplace").decode("utf-8"))


def say(line: str) -> None:
    """A line to the user; stdout holds the samples and nothing else."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no stderr
        sys.stderr.write(f"ksym: {for_terminal(line)}\n")
        sys.stderr.flush()


def give_up_output(error: OSError) -> None:
    """The output cannot be written (a full disk, say): say so once, let perf finish."""
    say(f"the output cannot be written ({error.strerror or error})")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != sys.stdout.fileno():  # It is that if stdout had been closed.
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

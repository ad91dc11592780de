"""What the handler prints: perf script's own text, or folded stacks.

Both spell a frame once, as a piece of text, and a sample as its pieces, leaf first; so
the spelling of a frame that comes again and again can be kept.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final, TextIO

#: perf's sign that samples carry no CPU.
_NO_CPU: Final = 0xFFFF_FFFF
_FLUSH: Final = 1 << 16
_UNKNOWN: Final = "[unknown]"


class TextOutput:
    """``perf script``'s default text.

    BPF frames have ``([bpf])`` for their dso, which readers of this format take for the
    kernel's.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._parts: list[str] = []
        self._lines = 0

    def user(self, node: dict[str, Any]) -> str:
        """A user frame of perf's callchain; perf prints it relative to its file."""
        symbol, offset = node.get("sym"), node.get("sym_off")
        if symbol and offset is not None:
            address = symbol["start"] + offset
            return self.kernel(address, symbol["name"], offset, node.get("dso") or "")
        name = symbol["name"] if symbol else ""
        return self.kernel(node["ip"], name, None, node.get("dso") or "")

    def kernel(self, address: int, name: str, offset: int | None, dso: str) -> str:
        """A frame; ``name`` is empty and ``offset`` None where they are not known."""
        if not name:
            return f"\t{address:16x} {_UNKNOWN} ({dso or _UNKNOWN})\n"
        if offset is None:
            return f"\t{address:16x} {name} ({dso})\n"
        return f"\t{address:16x} {name}+{offset:#x} ({dso})\n"

    def sample(self, event: dict[str, Any], pieces: list[str]) -> None:
        self._parts.append(_header(event))
        self._parts += pieces
        self._parts.append("\n")
        self._lines += len(pieces)
        if self._lines * 64 >= _FLUSH:
            self._flush()

    def close(self) -> None:
        """Print what is still held back."""
        self._flush()
        self._stream.flush()

    def _flush(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        self._lines = 0
        self._stream.write(text)


class FoldedOutput:
    """Folded stacks: ``comm;root;…;leaf count``, kernel frames ending in ``_[k]``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stacks: dict[str, int] = {}

    def user(self, node: dict[str, Any]) -> str:
        """A user frame of perf's callchain; without a name, the file it is in."""
        symbol = node.get("sym")
        if symbol:
            return _unfoldable(symbol["name"])
        return _in_file(node.get("dso") or "")

    def kernel(self, _address: int, name: str, _offset: int | None, dso: str) -> str:
        """A kernel frame; without a name, the module it is in."""
        return (_unfoldable(name) if name else _in_file(dso)) + "_[k]"

    def sample(self, event: dict[str, Any], pieces: list[str]) -> None:
        pieces.append(_unfoldable(event.get("comm") or ""))
        pieces.reverse()
        stack = ";".join(pieces)
        self._stacks[stack] = self._stacks.get(stack, 0) + 1

    def close(self) -> None:
        """Print the stacks, each with the number of its samples."""
        self._stream.writelines(
            f"{stack} {count}\n" for stack, count in sorted(self._stacks.items())
        )
        self._stream.flush()


def _unfoldable(name: str) -> str:
    """A name without what separates frames and stacks."""
    return name.replace(";", ":").replace("\n", " ")


def _in_file(dso: str) -> str:
    return f"[{_unfoldable(dso.rpartition('/')[2].strip('[]')) or 'unknown'}]"


def _header(event: dict[str, Any]) -> str:
    sample = event.get("sample") or {}
    seconds, nanoseconds = divmod(int(sample.get("time") or 0), 1_000_000_000)
    cpu = sample.get("cpu", _NO_CPU)
    place = "" if cpu == _NO_CPU else f" [{cpu:03d}]"
    # perf aligns the name of the task only where no callchain follows.
    comm = str(event.get("comm") or ":-1")
    comm = comm if event.get("callchain") else comm.rjust(16)
    return (
        f"{comm} {sample.get('tid', -1):7d}{place} {seconds:5d}.{nanoseconds // 1000:06d}: "
        f"{sample.get('period', 1):10d} {event.get('ev_name', '')}: \n"
    )


def say(line: str) -> None:
    """A line to the user; stdout holds the samples and nothing else."""
    sys.stderr.write(f"ksym: {line}\n")

"""What goes through the hooks, by shape: nothing here has to be inherited from.

Addresses are unsigned ints, ends are exclusive, times are in ns. All attributes are for
reading only. ``ksym_plugin`` has the classes that the plugin itself uses; sources make their
changes of ``Load``, ``Unload`` and ``Loss`` from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Literal, Union

    from typing_extensions import TypeIs

    #: A name or why there is none.
    Answer = Union["Frame", "Reason"]
    Clock = Literal["monotonic", "boottime", "realtime", "perf"]
    #: Sources by name: what to call to start one.
    Sources = Mapping[str, Callable[[], "Source"]]


class Symbol(Protocol):
    """A named range of kernel addresses. ``module`` is None for the core image.

    ``kind`` is ``kernel``, ``module``, ``bpf_prog``, ``bpf_trampoline``, ``bpf_dispatcher``,
    ``bpf_struct_ops``, ``other_bpf``, or ``ool`` (code moved out of line, as kprobes do).
    """

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def module(self) -> str | None: ...


class Frame(Protocol):
    """A stack entry with its name.

    ``offset`` counts from the symbol's start; ``module`` is ``[bpf]``, a module's name, or
    None for the core image. ``certainty`` is ``exact``; ``grace`` (unloaded before, maybe
    still running); or ``gap`` (changes may have been lost around that time).
    """

    @property
    def address(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def module(self) -> str | None: ...
    @property
    def kind(self) -> str: ...
    @property
    def certainty(self) -> str: ...


class Reason(Protocol):
    """Why an address has no name: ``text`` is a plain clause."""

    @property
    def text(self) -> str: ...


class Source(Protocol):
    """Where changes of symbols come from; constructing it has started it.

    Its methods are called from several threads, one at a time. ``interval`` is the
    seconds between reads for a source without a descriptor, else None.
    """

    @property
    def name(self) -> str: ...
    @property
    def interval(self) -> float | None: ...
    def fileno(self) -> int:
        """Readable when ``read`` has something; -1 for a source read every ``interval``."""
        ...

    def read(self) -> Sequence[object]:
        """All changes since the last call: Load, Unload, Loss. Never waits for one."""
        ...

    def snapshot(self) -> Sequence[object]:
        """A Load for each symbol that is there now."""
        ...

    def close(self) -> None:
        """Stop and give everything back; idempotent, and harmless in a forked child."""
        ...


def is_frame(answer: Answer) -> TypeIs[Frame]:
    """Whether an answer is a frame, and not a reason."""
    return hasattr(answer, "certainty")

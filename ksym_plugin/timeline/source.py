"""What an event source is, and what else the recorder follows.

Here, below all of them, so that whoever drives a source need not know which it is.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol, Union

    from ksym_plugin.timeline.program import ProgramDetails
    from ksym_plugin.timeline.symbols import Load, Loss, Unload

    Change = Union[Load, Unload, Loss]

    class DetailsSource(Protocol):
        """What tells of programs, and of their source lines."""

        def fileno(self) -> int:
            """Readable when something has come; -1 when nothing will any more."""

        def read(self) -> list[ProgramDetails]:
            """What has come since the last call; never waits."""

        def finish(self) -> list[ProgramDetails]:
            """What is still to come; the last call."""

    class ModuleSource(Protocol):
        """What tells of the kernel's modules."""

        notes: list[str]

        @property
        def unsettled(self) -> int | None:
            """From when on changes are not known yet, in CLOCK_MONOTONIC ns; None if all are."""

        def fileno(self) -> int:
            """Readable when ``read`` should be called; -1 when it never will be."""

        def read(self) -> list[Change]:
            """All changes since the last call; SourceError or OSError if there are no more."""

        def finish(self) -> list[Change]:
            """The rest of them; the last call."""

        def close(self) -> None:
            """Stop and give everything back; idempotent."""


class Source:
    """Where changes of BPF symbols come from.

    Constructing a source starts it: from when the constructor returns, whatever changes
    is in a later ``read``. So a user constructs, takes a ``snapshot``, and then reads.
    A constructor that raises SourceError has closed all it had opened.
    """

    #: What ``open_source`` knows it by.
    name: str = ""
    #: Seconds between reads for a source that cannot say when there is something; None
    #: for one with a ``fileno``.
    interval: float | None = None

    def __init__(self) -> None:
        #: What this source lacks here, in plain sentences, for whoever wants to know.
        self.notes: list[str] = []
        #: Whether the last snapshot had all that is no program: what it lacks is gone.
        self.lists_images = False

    def fileno(self) -> int:
        """A descriptor that becomes readable when ``read`` should be called; or -1."""
        return -1

    def read(self) -> list[Change]:
        """All changes since the last call; never waits for one."""
        raise NotImplementedError

    def snapshot(self) -> list[Load]:
        """What the kernel holds now. SourceError if it does not tell."""
        raise NotImplementedError

    def measure(self) -> None:
        """Have the kernel count what the source costs it from now on, where it can.

        SourceError where it does not let this user.
        """

    def stats(self) -> dict[str, int]:
        """What the source has counted, by name; nothing where it does not count."""
        return {}

    def close(self) -> None:
        """Stop and give everything back; idempotent."""

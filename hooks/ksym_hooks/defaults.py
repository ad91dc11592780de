"""What a host gets where no plugin has an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksym_hooks.markers import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ksym_hooks.types import Frame

NAME = "defaults"


class NoAnswer:
    """The reason why an address has no name: nobody was there to ask."""

    __slots__ = ()
    text = "no plugin has an answer"

    def __repr__(self) -> str:
        return f"Reason({self.text})"


NO_ANSWER = NoAnswer()


@hookimpl(trylast=True)
def ksym_resolve_frames(addresses: Sequence[int]) -> list[NoAnswer]:
    """The reason that nobody else has an answer, for each address."""
    return [NO_ANSWER] * len(addresses)


@hookimpl(trylast=True)
def ksym_format_frame(frame: Frame) -> str:
    """The name, and a question mark where it is not certain."""
    return f"{frame.name}?" if frame.certainty == "gap" else frame.name

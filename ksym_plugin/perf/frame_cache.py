"""Pieces of the output, kept by address: a profile has the same ones again and again."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.perf.output import Piece


class CoreFrames:
    """Pieces of frames at addresses that neither BPF nor a module ever held.

    ``leaves`` are those of samples' first frames, which with source lines differ from
    ``callers`` at the same address; else both are one.
    """

    __slots__ = ("_inlined", "callers", "leaves", "met")

    def __init__(self, with_lines: bool) -> None:
        self.callers: dict[int, Piece] = {}
        self.leaves: dict[int, Piece] = {} if with_lines else self.callers
        #: Those met in the sample at hand: its name, whether it is the leaf, its piece.
        self.met: dict[int, tuple[object, bool, Piece]] = {}
        #: Addresses that stand for several frames.
        self._inlined: set[int] = set()

    def is_inlined_into(self, address: int, name: object) -> bool:
        """Whether another function was met at this address: it is inlined into this one."""
        first = self.met.get(address)
        return first is not None and first[0] != name

    def meet(self, address: int, name: object, is_leaf: bool, piece: Piece) -> None:
        """A frame of the sample at hand; ``name`` tells functions at one address apart."""
        if self.met.setdefault(address, (name, is_leaf, piece))[0] != name:
            self._inlined.add(address)

    def keep(self, has_chain: bool) -> None:
        """Keep the frames of a sample that has ended.

        Not where an address has several pieces: perf expands inlined functions to
        frames with one address, all of them in a callchain and none without.
        """
        if has_chain:
            for address, (_, is_leaf, piece) in self.met.items():
                if address not in self._inlined:
                    (self.leaves if is_leaf else self.callers)[address] = piece
        self.met.clear()

    def forget(self) -> None:
        """Keep nothing of the sample at hand."""
        self.met.clear()

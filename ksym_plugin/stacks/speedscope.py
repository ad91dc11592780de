"""Stacks for speedscope, in its own format.

The schema is https://www.speedscope.app/file-format-schema.json; it is in speedscope's npm
package too. All profiles share one table of frames.
"""

from __future__ import annotations

from ksym_plugin.stacks.folded import BPF, KERNEL, frame_of, readable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any, Final

    Samples = Iterable[tuple[str, float]]

SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"
#: speedscope gives a file a colour: so each class has one where there is no other.
_FILES: Final = {BPF: "[bpf]", KERNEL: "[kernel]"}


def write(
    name: str,
    profiles: Iterable[tuple[str, Samples]],
    places: Mapping[str, tuple[str, int]] | None = None,
) -> Iterator[str]:
    """A file's text, piece by piece, of profiles: what each is called, and its samples.

    A sample is a stack (``root;…;leaf``) and its weight. Their order is kept: it is what
    speedscope takes for the order of time. ``places`` are the file and line of frames that
    do not say so themselves.
    """
    import json

    frames = _Frames(places or {})
    yield f'{{"$schema":{json.dumps(SCHEMA)},"name":{json.dumps(readable(name))},"profiles":['
    separator = ""
    for title, samples in profiles:
        yield separator + json.dumps(_profile(title, samples, frames), separators=(",", ":"))
        separator = ","
    shared = json.dumps({"frames": frames.table}, separators=(",", ":"))
    yield f'],"shared":{shared},"activeProfileIndex":0,"exporter":"ksym-plugin"}}\n'


class _Frames:
    """The frames by number, each kept once.

    A function has one line however many it was at: to speedscope every entry of the table
    is a function of its own, so an entry a line would split it in all of its views.
    """

    def __init__(self, places: Mapping[str, tuple[str, int]]) -> None:
        self._places = places
        self.table: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}

    def numbers(self, stack: str) -> list[int]:
        return [self._number(text) for text in stack.split(";")]

    def _number(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.table)
            frame = frame_of(text)
            entry: dict[str, Any] = {"name": readable(frame.name)}
            file, line = self._places.get(text, (frame.file, frame.line))
            file = file or _FILES.get(frame.kind, "")
            if file:
                entry["file"] = readable(file)
            if line:
                entry["line"] = line
            self.table.append(entry)
        return number


def _profile(title: str, samples: Samples, frames: _Frames) -> dict[str, Any]:
    stacks: list[list[int]] = []
    weights: list[float] = []
    for stack, weight in samples:
        stacks.append(frames.numbers(stack))
        weights.append(weight)
    return {
        "type": "sampled",
        "name": readable(title),
        "unit": "none",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": stacks,
        "weights": weights,
    }

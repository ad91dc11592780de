"""Stacks for speedscope, in its own format.

The schema is https://www.speedscope.app/file-format-schema.json; it is in speedscope's npm
package too. All profiles share one table of frames.
"""

from __future__ import annotations

from ksym_plugin.stacks.frames import BPF, KERNEL
from ksym_plugin.stacks.names import readable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from ksym_plugin.stacks.frames import FrameTable, Stack, StackFrame
    from ksym_plugin.timeline.symbols import SourceLocation

    Samples = Iterable[tuple[Stack, float]]

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
#: speedscope gives a file a colour: so each class has one where there is no other.
_FILES = {BPF: "[bpf]", KERNEL: "[kernel]"}


def write(
    name: str,
    table: FrameTable,
    profiles: Iterable[tuple[str, Samples]],
    locations: Mapping[int, SourceLocation] | None = None,
) -> Iterator[str]:
    """A file's text, piece by piece, of profiles: what each is called, and its samples.

    A sample is a stack of frames in ``table``, and its weight. Their order is kept: it is
    what speedscope takes for the order of time. ``locations`` are those of frames that
    have none of their own.
    """
    import json

    #: The indexes of frames in the file, by their numbers; only those that are used.
    indexes: dict[int, int] = {}
    yield f'{{"$schema":{json.dumps(SCHEMA)},"name":{json.dumps(readable(name))},"profiles":['
    separator = ""
    for title, samples in profiles:
        profile = _profile(title, samples, indexes)
        yield separator + json.dumps(profile, separators=(",", ":"))
        separator = ","
    places = locations or {}
    frames = [_frame(table.frames[number], places.get(number)) for number in indexes]
    shared = json.dumps({"frames": frames}, separators=(",", ":"))
    yield f'],"shared":{shared},"activeProfileIndex":0,"exporter":"ksym-plugin"}}\n'


def _frame(frame: StackFrame, location: SourceLocation | None) -> dict[str, Any]:
    """A function has one line however many it was at.

    To speedscope every entry of the table is a function of its own, so an entry a line would
    split it in all of its views.
    """
    location = location or frame.location
    file = (location and location.file) or _FILES.get(frame.kind, "")
    entry: dict[str, Any] = {"name": readable(frame.name)}
    if file:
        entry["file"] = readable(file)
    if location is not None and location.line:
        entry["line"] = location.line
    return entry


def _profile(title: str, samples: Samples, indexes: dict[int, int]) -> dict[str, Any]:
    stacks: list[list[int]] = []
    weights: list[float] = []
    for stack, weight in samples:
        stacks.append([indexes.setdefault(number, len(indexes)) for number in stack])
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

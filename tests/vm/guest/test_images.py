"""Generated images end to end: recorded, in samples, and told of when they are gone."""

from __future__ import annotations

import pytest

from tests.oracle import truth
from tests.vm.guest.around import Recorded
from tests.vm.guest.images import TRACED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def recorded(workloads: Path) -> Recorded:
    return Recorded(workloads, "images")


def of_kind(recorded: Recorded, prefix: str) -> list[tuple[int, int, str]]:
    """Start, the start of what follows, and name, as the kernel listed them."""
    listed = recorded.truth["names"]
    following = [start for start, _ in listed[1:]] + [listed[-1][0] + 4096]
    return [
        (start, min(end, start + 4096), name)
        for (start, name), end in zip(listed, following)
        if name.startswith(prefix)
    ]


@pytest.mark.parametrize("prefix, least", [("bpf_trampoline_", 20), ("bpf_dispatcher_xdp", 1)])
def test_samples_in_images_have_their_names(recorded: Recorded, prefix: str, least: int) -> None:
    found = 0
    for start, end, name in of_kind(recorded, prefix):
        inside = recorded.frames(start, end)
        # Where its code ends nobody tells; behind that there is no name.
        assert {(frame.name, frame.dso) for frame in inside} <= {
            (name, "[bpf]"),
            (truth.UNKNOWN, "[bpf]"),
        }
        found += [frame.name for frame in inside].count(name)
    print(f"{found} frames in {prefix}")
    assert found >= least


def test_all_have_their_names_afterwards(recorded: Recorded) -> None:
    listed = recorded.truth["names"]
    answers = recorded.resolve(recorded.truth["during"], *(start + 1 for start, _ in listed))
    assert [answer["name"] for answer in answers] == [name for _, name in listed]
    assert {answer["certainty"] for answer in answers} == {"exact"}
    traced = [answer.get("traced") for answer in answers if answer["kind"] == "bpf_trampoline"]
    assert TRACED in traced


def test_the_images_of_struct_ops_too(recorded: Recorded, kernel: str) -> None:
    images = [name for _, _, name in of_kind(recorded, "bpf__tcp_congestion_ops_")]
    if not images:
        pytest.skip(f"Linux {kernel} gives the images of struct_ops no symbols")
    assert len(images) == 3

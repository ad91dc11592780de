"""A flame graph of 50,000 distinct stacks: the time to read and draw it, and its size.

The stacks are made up, but with the shape of a busy server's: a few processes, thousands
of functions, 20 to 60 frames deep, many stacks that differ near their leaves.
"""

from __future__ import annotations

import random

from bench.measure import Figures, in_turn
from bench.report import CPU, row
from ksym_plugin.stacks import flamegraph, folded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STACKS, ROUNDS = 50_000, 5
QUICK = (500, 1)


def rows(quick: bool) -> list[dict[str, Any]]:
    stacks, rounds = QUICK if quick else (STACKS, ROUNDS)
    lines = made_up(stacks)
    drawn = ""

    def draw() -> None:
        nonlocal drawn
        drawn = "".join(flamegraph.draw(folded.parse(lines), "bench"))

    (taken,) = in_turn(rounds, lambda: draw)
    size = len(drawn.encode("utf-8")) / 1e6
    megabytes = sum(map(len, lines)) / 1e6
    return [
        row(
            f"SVG of {stacks:,} distinct stacks",
            taken,
            "s",
            ("<=", 2),
            CPU,
            note=f"{megabytes:.0f} MB of folded text",
        ),
        row("  its size", Figures([size]), "MB", ("<=", 3)),
    ]


def made_up(count: int) -> list[bytes]:
    """So many distinct folded lines, the same each time."""
    chance = random.Random(1)
    user = [f"function_{n}_of_some_length{'x' * (n % 23)}" for n in range(3000)]
    kernel = [f"kernel_function_{n}_[k]" for n in range(600)]
    programs = [f"bpf_prog_{n:016x}_program_{n}_[b]" for n in range(50)]
    stacks: dict[str, int] = {}
    while len(stacks) < count:
        start = chance.randrange(20)
        frames = [f"process_{chance.randrange(6)}"]
        frames += [
            user[(start * 37 + depth * chance.choice((1, 1, 1, 1, 1, 3))) % len(user)]
            for depth in range(chance.randrange(10, 45))
        ]
        frames += [
            kernel[(start + 7 * depth + chance.choice((0, 0, 0, 50))) % len(kernel)]
            for depth in range(chance.randrange(12))
        ]
        if chance.random() < 0.2:
            frames.append(chance.choice(programs))
        stacks[";".join(frames)] = chance.randrange(1, 50)
    return [f"{stack} {samples}\n".encode() for stack, samples in stacks.items()]

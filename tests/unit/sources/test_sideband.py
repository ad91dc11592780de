"""What one drain's records mean, from streams written down by hand and made up at random.

The random part has its own little kernel: it knows the true order of loads and unloads
and spreads their records over CPUs, and the answer is checked against that truth.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.kernel.bpf_prog import ProgramInfo
from ksym_plugin.kernel.perf_ring import BpfEvent, KSymbol
from ksym_plugin.sources.sideband import Sideband
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.symbols import (
    BPF_DISPATCHER,
    BPF_PROG,
    BPF_TRAMPOLINE,
    OOL,
    UNNAMED_BPF,
    Load,
    Symbol,
    Unload,
)

TAG, SUBTAG, OTHER = "11" * 8, "22" * 8, "33" * 8
S = 0xFFFFFFFFC0000040


def name(tag, own="main"):
    return f"bpf_prog_{tag}_{own}"


def on(start, text, length=64, kind=1):
    return KSymbol(start, length, kind, False, text)


def off(start, text, length=64):
    return KSymbol(start, length, 1, True, text)


def loaded(prog_id, tag=TAG):
    return BpfEvent(1, prog_id, tag)


def unloaded(prog_id, tag=TAG):
    return BpfEvent(2, prog_id, tag)


def program(prog_id, functions, tags, load_time=50):
    made = ProgramInfo(prog_id, 1, tags[0], "main", load_time, 0, False)
    made.functions, made.tags = functions, tags
    return made


class Reader:
    """In place of bpf(2)."""

    def __init__(self, programs=(), names=(), refuses=False):
        self.programs = {item.id: item for item in programs}
        self.names = names
        self.refuses = refuses

    def program(self, prog_id):
        if self.refuses:
            raise SourceError("refused")
        return self.programs.get(prog_id)

    def function_names(self, prog_id):
        return list(self.names)


def sideband(*programs, names=()):
    return Sideband(Reader(programs, names))


def brief(changes):
    return [
        ("load", change.symbol.start, change.symbol.name, change.prog_id)
        if isinstance(change, Load)
        else ("unload", change.start, change.name, change.prog_id)
        for change in changes
    ]


def test_a_program_that_is_there_gets_its_id_its_functions_and_its_load_time():
    there = program(7, [(S, 60), (S + 128, 40)], [TAG, SUBTAG])
    records = [on(S, name(TAG), 60), on(S + 128, name(SUBTAG, "sub"), 40), loaded(7)]
    changes = sideband(there).changes([records], 10, 100)
    assert brief(changes) == [
        ("load", S, name(TAG), 7),
        ("load", S + 128, name(SUBTAG, "sub"), 7),
    ]
    assert [(c.symbol.end, c.earliest, c.latest) for c in changes] == [
        (S + 60, 50, 100),
        (S + 168, 50, 100),
    ]


def test_one_that_is_gone_keeps_the_window_and_has_the_id_of_its_tag():
    records = [on(S, name(TAG)), loaded(7), off(S, name(TAG)), unloaded(7)]
    load, unload = sideband().changes([records], 10, 100)
    assert (load.prog_id, unload.prog_id) == (7, 7)
    assert (load.earliest, unload.earliest, unload.latest) == (10, 10, 100)
    assert load.latest < unload.latest


def test_where_bpf_is_refused_the_tag_has_to_do():
    changes = Sideband(Reader(refuses=True)).changes([[on(S, name(TAG)), loaded(7)]], 10, 100)
    assert brief(changes) == [("load", S, name(TAG), 7)]


def test_two_loaders_interleaved_on_one_cpu_are_told_apart():
    a, b = name(TAG, "a"), name(OTHER, "b")
    sub = name(SUBTAG, "sub")
    pa = program(7, [(S, 64), (S + 256, 64)], [TAG, SUBTAG])
    pb = program(8, [(S + 512, 64), (S + 768, 64)], [OTHER, SUBTAG])
    records = [
        on(S, a),
        on(S + 512, b),
        on(S + 256, sub),
        loaded(7),
        on(S + 768, sub),
        loaded(8, OTHER),
    ]
    changes = sideband(pa, pb).changes([records], 10, 100)
    assert {(c.symbol.start, c.prog_id) for c in changes} == {
        (S, 7),
        (S + 256, 7),
        (S + 512, 8),
        (S + 768, 8),
    }


def test_the_same_program_loaded_twice_at_once_and_gone_gets_no_ids():
    twice = [on(S, name(TAG)), on(S + 64, name(TAG)), loaded(8), loaded(7)]
    changes = sideband().changes([twice], 10, 100)
    assert [change.prog_id for change in changes] == [None, None]


def test_an_announcement_split_between_two_cpus_is_put_together():
    there = program(7, [(S, 64), (S + 128, 64)], [TAG, SUBTAG])
    rings = [[on(S, name(TAG))], [on(S + 128, name(SUBTAG, "sub")), loaded(7)]]
    assert {c.prog_id for c in sideband(there).changes(rings, 10, 100)} == {7}


def test_an_event_that_comes_a_drain_later_names_the_load_a_second_time():
    side = sideband(program(7, [(S, 64)], [TAG], load_time=70))
    (first,) = side.changes([[on(S, name(TAG))]], 10, 100)
    (again,) = side.changes([[loaded(7)]], 100, 200)
    assert (first.prog_id, first.latest) == (None, 100)
    assert (again.prog_id, again.earliest, again.latest) == (7, 70, 100)
    (unload,) = side.changes([[off(S, name(TAG)), unloaded(7)]], 200, 300)
    assert unload.prog_id == 7


def test_a_main_program_announced_without_a_name_is_healed():
    there = program(7, [(S, 64), (S + 128, 64)], [TAG, SUBTAG])
    records = [on(S, ""), on(S + 128, name(SUBTAG, "sub")), loaded(7)]
    side = sideband(there, names=[name(TAG), name(SUBTAG, "sub")])
    assert [c.symbol.name for c in side.changes([records], 0, 100)] == [
        name(TAG),
        name(SUBTAG, "sub"),
    ]
    # It goes as namelessly as it came, and is still known.
    ends = [off(S, ""), off(S + 128, name(SUBTAG, "sub")), unloaded(7)]
    assert brief(side.changes([ends], 100, 200)) == [
        ("unload", S, name(TAG), 7),
        ("unload", S + 128, name(SUBTAG, "sub"), 7),
    ]


def test_a_nameless_program_that_is_gone_says_that_its_name_is_unknown():
    (load,) = sideband().changes([[on(S, ""), loaded(7)]], 0, 100)
    assert (load.symbol.name, load.symbol.kind, load.prog_id) == (UNNAMED_BPF, BPF_PROG, 7)


def test_subprograms_announced_under_the_main_name_are_healed():
    there = program(7, [(S, 64), (S + 128, 64)], [TAG, SUBTAG])
    records = [on(S, name(TAG)), on(S + 128, name(TAG)), loaded(7)]
    side = sideband(there, names=[name(TAG), name(SUBTAG, "sub")])
    assert [c.symbol.name for c in side.changes([records], 0, 100)] == [
        name(TAG),
        name(SUBTAG, "sub"),
    ]
    ends = [off(S, name(TAG)), off(S + 128, name(TAG)), unloaded(7)]
    assert brief(side.changes([ends], 100, 200)) == [
        ("unload", S, name(TAG), 7),
        ("unload", S + 128, name(SUBTAG, "sub"), 7),
    ]


def test_a_main_program_announced_under_its_split_tag_is_healed():
    there = program(7, [(S, 64)], [TAG])
    there.split_tag = OTHER
    side = sideband(there, names=[name(TAG)])
    assert brief(side.changes([[on(S, name(OTHER)), loaded(7)]], 0, 100)) == [
        ("load", S, name(TAG), 7)
    ]


def test_subprograms_under_the_main_name_are_not_given_a_wrong_one_when_gone():
    records = [on(S, name(TAG)), on(S + 128, name(TAG)), loaded(7)]
    changes = sideband().changes([records], 0, 100)
    assert [c.symbol.name for c in changes] == [name(TAG), UNNAMED_BPF]


def test_a_program_that_is_not_jited_changes_nothing():
    records = [on(S, name(TAG), length=0), loaded(7), off(S, name(TAG), length=0), unloaded(7)]
    assert sideband().changes([records], 0, 100) == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [("bpf_trampoline_6442", BPF_TRAMPOLINE), ("bpf_dispatcher_xdp", BPF_DISPATCHER)],
)
def test_an_images_length_is_only_an_upper_bound(text, kind):
    (load,) = sideband().changes([[on(S, text, length=4096)]], 0, 100)
    assert (load.symbol.kind, load.open_ended, load.prog_id) == (kind, True, None)


def test_out_of_line_code_has_the_module_that_kallsyms_gives_it():
    (load,) = sideband().changes([[on(S, "ftrace_trampoline", 200, kind=2)]], 0, 100)
    assert load.symbol == Symbol(S, S + 200, "ftrace_trampoline", OOL, "__builtin__ftrace")


def _orders(first, second):
    return [[first, second], [second, first]]


def test_old_goes_and_new_comes_at_one_start_under_one_name():
    for rings in _orders([off(S, name(TAG)), unloaded(6)], [on(S, name(TAG)), loaded(7)]):
        side = sideband(program(7, [(S, 64)], [TAG]))
        side.know([Load(Symbol(S, S + 64, name(TAG), BPF_PROG, "[bpf]"), 0, 1, 6)])
        changes = side.changes(rings, 10, 100)
        assert brief(changes) == [("unload", S, name(TAG), 6), ("load", S, name(TAG), 7)]
        assert changes[0].latest < changes[1].latest


def test_the_same_where_unloads_come_without_an_id():
    for rings in _orders([off(S, name(TAG)), unloaded(0)], [on(S, name(TAG)), loaded(7)]):
        side = sideband(program(7, [(S, 64)], [TAG]))
        side.know([Load(Symbol(S, S + 64, name(TAG), BPF_PROG, "[bpf]"), 0, 1, 6)])
        assert [kind for kind, *_ in brief(side.changes(rings, 10, 100))] == ["unload", "load"]
        assert side.live[S] == (name(TAG), 7)


def test_one_program_comes_and_goes_on_different_cpus():
    for rings in _orders([on(S, name(TAG)), loaded(7)], [off(S, name(TAG)), unloaded(7)]):
        side = sideband()
        assert [kind for kind, *_ in brief(side.changes(rings, 10, 100))] == ["load", "unload"]
        assert S not in side.live


def test_a_snapshot_taken_before_the_records_were_read_does_not_confuse():
    side = sideband()
    side.know([Load(Symbol(S, S + 64, name(TAG), BPF_PROG, "[bpf]"), 0, 1, 7)])
    rings = [[off(S, name(TAG)), unloaded(7)], [on(S, name(TAG)), loaded(7)]]
    assert [kind for kind, *_ in brief(side.changes(rings, 10, 100))] == ["load", "unload"]


def test_a_snapshot_with_the_last_program_of_a_drain_takes_no_end_from_the_one_before():
    # Unloads without an id, as from 5.19 to 6.1.
    side = sideband(program(8, [(S, 64)], [TAG]))
    side.know([Load(Symbol(S, S + 64, name(TAG), BPF_PROG, "[bpf]"), 0, 1, 8)])
    ring = [
        on(S, name(TAG)),
        loaded(7),
        off(S, name(TAG)),
        unloaded(0),
        on(S, name(TAG)),
        loaded(8),
    ]
    changes = side.changes([ring], 10, 100)
    assert [(kind, prog_id) for kind, *_, prog_id in brief(changes)] == [
        ("load", 7), ("unload", None), ("load", 8),
    ]  # fmt: skip


def _history(rnd, steps):
    """(start, tag, id, is_load) in true order; ids ascend, starts and names are reused."""
    live: dict[int, tuple[str, int]] = {}
    prog_id = 10
    for _ in range(steps):
        start = S + 64 * rnd.randrange(3)
        if start in live:
            tag, gone = live.pop(start)
            yield start, tag, gone, False
        else:
            prog_id += 1
            tag = rnd.choice([TAG, OTHER])
            live[start] = (tag, prog_id)
            yield start, tag, prog_id, True


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.integers(0, 8), st.integers(1, 3))
def test_any_spread_over_cpus_comes_out_in_an_order_that_can_have_been(rnd, steps, earlier, cpus):
    history = list(_history(rnd, earlier + steps))
    before = {}
    for start, tag, prog_id, is_load in history[:earlier]:
        if is_load:
            before[start] = (tag, prog_id)
        else:
            del before[start]
    rings: list[list] = [[] for _ in range(cpus)]
    at_end = dict(before)
    for start, tag, prog_id, is_load in history[earlier:]:
        ring = rnd.choice(rings)
        if is_load:
            ring += [on(start, name(tag)), loaded(prog_id, tag)]
            at_end[start] = (tag, prog_id)
        else:
            ring += [off(start, name(tag)), unloaded(prog_id, tag)]
            del at_end[start]
    side = sideband(
        *(program(prog_id, [(start, 64)], [tag]) for start, (tag, prog_id) in at_end.items())
    )
    side.know(
        Load(Symbol(start, start + 64, name(tag), BPF_PROG, "[bpf]"), 0, 1, prog_id)
        for start, (tag, prog_id) in before.items()
    )
    changes = side.changes(rings, 10, 1000)
    for start in {item[0] for item in history[earlier:]}:
        truth = [
            ("load" if is_load else "unload", at, name(tag), prog_id)
            for at, tag, prog_id, is_load in history[earlier:]
            if at == start
        ]
        here = [
            change
            for change in changes
            if (change.symbol.start if isinstance(change, Load) else change.start) == start
        ]
        assert brief(here) == truth
        times = [change.latest for change in here]
        assert times == sorted(set(times))
    assert {start: (name(tag), pid) for start, (tag, pid) in at_end.items()} == side.live


@given(
    st.lists(
        st.lists(
            st.one_of(
                st.builds(
                    KSymbol,
                    st.sampled_from([S, S + 64, 0, 2**64 - 1]),
                    st.sampled_from([0, 64, 4096, 2**32 - 1]),
                    st.integers(0, 3),
                    st.booleans(),
                    st.sampled_from(["", name(TAG), name(OTHER), "bpf_trampoline_1", "x"]),
                ),
                st.builds(
                    BpfEvent,
                    st.integers(0, 3),
                    st.integers(0, 3),
                    st.sampled_from([TAG, OTHER, SUBTAG]),
                ),
            ),
            max_size=12,
        ),
        max_size=3,
    )
)
def test_hostile_records_never_raise_and_windows_are_windows(rings):
    there = program(
        2, [(S, 64), (S + 64, 64)], [TAG, SUBTAG], load_time=random.Random(1).randrange(200)
    )
    side = sideband(there)
    for drain in range(2):
        for change in side.changes(rings, 10 + 100 * drain, 100 + 100 * drain):
            assert isinstance(change, (Load, Unload))
            assert change.earliest <= change.latest <= 100 + 100 * drain

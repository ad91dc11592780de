"""Names as the kernel makes them, kinds, and what compares equal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.timeline import symbols
from ksym_plugin.timeline.symbols import Symbol, bpf_kind, is_image, split_bpf_name

#: The grammar of bpf_get_prog_name() as an expression: "bpf_prog_", the tag by
#: bin2hex(), and "_%s" where the program has a name.
GRAMMAR = re.compile(r"bpf_prog_([0-9a-f]{16})(?:_(.*))?", re.DOTALL)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bpf_prog_30304e82b4033ea3_kprobe__demo", ("30304e82b4033ea3", "kprobe__demo")),
        ("bpf_prog_30304e82b4033ea3", ("30304e82b4033ea3", "")),
        ("bpf_prog_run", None),
        ("bpf_prog_get_curr_or_next", None),
        ("bpf_prog_deadbeef_x", None),
        ("bpf_prog_30304e82b4033ea3__lead", ("30304e82b4033ea3", "_lead")),
        ("bpf_prog_30304e82b4033ea3_a.b.c", ("30304e82b4033ea3", "a.b.c")),
        ("bpf_prog_30304e82b4033ea3x", None),
        ("bpf_prog_30304E82B4033EA3_x", None),
        ("bpf_prog_30304e82b4033ea", None),
        ("bpf_prog_", None),
        ("", None),
        ("xbpf_prog_30304e82b4033ea3_x", None),
        ("__cfi_bpf_prog_30304e82b4033ea3_x", None),
        ("bpf_trampoline_6442500001", None),
    ],
)
def test_bpf_name_parsing(name: str, expected: tuple[str, str] | None) -> None:
    assert split_bpf_name(name) == expected


@given(
    st.one_of(
        st.from_regex(GRAMMAR, fullmatch=True),
        st.text("bpf_rog0123456789abcdef.X", max_size=30).map(lambda rest: "bpf_prog_" + rest),
        st.text(max_size=40),
    )
)
def test_names_split_by_the_kernels_grammar_alone(name: str) -> None:
    match = GRAMMAR.fullmatch(name)
    assert split_bpf_name(name) == (match and (match[1], match[2] or ""))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bpf_prog_30304e82b4033ea3_x", symbols.BPF_PROG),
        ("", symbols.BPF_PROG),
        (symbols.UNNAMED_BPF, symbols.BPF_PROG),
        ("bpf_trampoline_6442500001", symbols.BPF_TRAMPOLINE),
        ("bpf_trampoline_6442500002_1", symbols.BPF_TRAMPOLINE),
        ("bpf_dispatcher_xdp", symbols.BPF_DISPATCHER),
        ("bpf__tcp_congestion_ops_init", symbols.BPF_STRUCT_OPS),
        ("__cfi_bpf_prog_30304e82b4033ea3_x", symbols.OTHER_BPF),
        ("bpf_prog_run", symbols.OTHER_BPF),
    ],
)
def test_kind_of_what_is_known_to_be_bpfs(name: str, kind: str) -> None:
    assert bpf_kind(name) == kind
    images = (symbols.BPF_TRAMPOLINE, symbols.BPF_DISPATCHER, symbols.BPF_STRUCT_OPS)
    assert is_image(kind) == (kind in images)


def test_symbols_compare_by_value() -> None:
    one = Symbol(16, 32, "a", symbols.KERNEL, None)
    assert one == Symbol(16, 32, "a", symbols.KERNEL, None)
    assert hash(one) == hash(Symbol(16, 32, "a", symbols.KERNEL, None))
    others = [
        Symbol(17, 32, "a", symbols.KERNEL, None),
        Symbol(16, 33, "a", symbols.KERNEL, None),
        Symbol(16, 32, "b", symbols.KERNEL, None),
        Symbol(16, 32, "a", symbols.MODULE, None),
        Symbol(16, 32, "a", symbols.KERNEL, "m"),
    ]
    assert one not in others
    assert one != "a"


def test_reasons_are_told_apart_by_identity_and_text() -> None:
    reasons = [value for value in vars(symbols).values() if isinstance(value, symbols.Reason)]
    assert len(reasons) == 12
    assert len({reason.text for reason in reasons}) == len(reasons)
    assert symbols.Reason(symbols.LOST.text) != symbols.LOST

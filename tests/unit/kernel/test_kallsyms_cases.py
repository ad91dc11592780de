"""Tables that misled other tools, each with its right answers."""

from __future__ import annotations

import pytest

from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.timeline import symbols
from ksym_plugin.timeline.errors import KallsymsError


def answer(table: Kallsyms, address: int) -> str:
    """``name+0xoffset [module]``, or ``-`` for no name."""
    found = table.find(address)
    if isinstance(found, symbols.Reason):
        return "-"
    assert found.start <= address < found.end
    suffix = f" [{found.module}]" if found.module else ""
    return f"{found.name}+{address - found.start:#x}{suffix}"


def check(
    text: bytes,
    expected: dict[int, str],
    module_sizes: dict[str, tuple[int, int]] | None = None,
) -> Kallsyms:
    table = Kallsyms.parse(text, module_sizes)
    assert {at: answer(table, at) for at in expected} == expected
    return table


def test_all_zero_is_hidden_and_names_nothing() -> None:
    table = Kallsyms.parse(
        b"0000000000000000 T _text\n0000000000000000 T _stext\n"
        b"0000000000000000 t alpha_fn\n0000000000000000 T beta_fn\n"
        b"0000000000000000 T _etext\n0000000000000000 t gamma_fn\t[demo_mod]\n"
    )
    assert table.hidden
    for address in (0, 1, 0x1000, 0xFFFFFFFF81000000, (1 << 64) - 1):
        assert table.find(address) is symbols.HIDDEN
    assert table.by_name("alpha_fn") == []
    assert table.aliases(0) == []
    assert table.text_start is None
    assert table.skipped == 0
    assert table.is_kernel(0xFFFFFFFF81000000)
    assert not table.is_kernel(0x7F0000001234)


def test_hidden_on_32_bits() -> None:
    table = Kallsyms.parse(b"00000000 T _text\n00000000 t alpha_fn\n")
    assert table.hidden
    assert table.find(0xC0008000) is symbols.HIDDEN
    assert table.is_kernel(0xC0008000)
    assert not table.is_kernel(0x8000)


def test_percpu_offsets_are_neither_hidden_nor_names() -> None:
    table = check(
        b"0000000000000000 A __per_cpu_start\n0000000000001000 A fixed_percpu_data\n"
        b"000000000002a000 A __per_cpu_end\nffffffff91000000 T _text\n"
        b"ffffffff91000000 T _stext\nffffffff91000240 T first_fn\nffffffff92000000 T _etext\n",
        {
            0x0: "-",
            0x1010: "-",
            0x2A008: "-",
            0x7F0000001234: "-",
            0xFFFFFFFF90FFFFFF: "-",
            0xFFFFFFFF91000250: "first_fn+0x10",
        },
    )
    assert not table.hidden
    assert table.text_start == 0xFFFFFFFF91000000


def test_etext_bounds_text_whatever_its_type() -> None:
    check(
        b"ffffffffa5000000 T _text\nffffffffa5000100 T last_real_fn\n"
        b"ffffffffa5400000 D _etext\nffffffffa6000000 D some_data\n"
        b"ffffffffc0100000 t mod_fn\t[demo]\n",
        {
            0xFFFFFFFFA53FFFFF: "last_real_fn+0x3ffeff",
            0xFFFFFFFFA5400000: "-",
            0xFFFFFFFFA5400010: "-",
            0xFFFFFFFFA6000008: "-",
            0xFFFFFFFFC0100008: "mod_fn+0x8 [demo]",
        },
    )


def test_nothing_owns_the_holes_after_text_and_init_text() -> None:
    check(
        b"ffffffffa5000000 T _text\nffffffffa5000100 T last_real_fn\n"
        b"ffffffffa5400000 T _etext\nffffffffa5400000 T __stop_notes\n"
        b"ffffffffa7000000 T _sinittext\nffffffffa7000000 t first_init\n"
        b"ffffffffa7000040 t last_init\nffffffffa7000080 T _einittext\n"
        b"ffffffffa7000200 t drop_driver\nffffffffa8000000 D _sdata\n",
        {
            0xFFFFFFFFA5400000: "-",
            0xFFFFFFFFA6000000: "-",
            0xFFFFFFFFA7000044: "last_init+0x4",
            0xFFFFFFFFA7000080: "-",
            0xFFFFFFFFA7000100: "-",
            0xFFFFFFFFA7000204: "drop_driver+0x4",
        },
    )


def test_function_that_starts_where_a_section_ends_is_named() -> None:
    check(
        b"ffffffffa7000000 t last_init\nffffffffa7000080 T _einittext\n"
        b"ffffffffa7000080 t drop_driver\nffffffffa7000090 t other\n",
        {0xFFFFFFFFA7000084: "drop_driver+0x4"},
    )


def test_modules_in_any_order() -> None:
    table = check(
        b"ffffffff9a000000 T _text\nffffffff9a000400 T core_fn\nffffffff9b000000 T _etext\n"
        b"ffffffffc0900000 t strp_like_exit\t[strp_demo]\n"
        b"ffffffffc0500000 t wifi_rx\t[wifi_demo]\nffffffffc0500300 t wifi_tx\t[wifi_demo]\n"
        b"ffffffffc0700000 t mac_poll\t[mac_demo]\n",
        {
            0xFFFFFFFFC0500310: "wifi_tx+0x10 [wifi_demo]",
            0xFFFFFFFFC0700004: "mac_poll+0x4 [mac_demo]",
            0xFFFFFFFFDF0099CD: "-",
        },
    )
    found = table.find(0xFFFFFFFFC0500310)
    assert isinstance(found, symbols.Symbol)
    assert (found.kind, found.module) == (symbols.MODULE, "wifi_demo")


def test_mapping_symbols_are_dropped_before_anything_else() -> None:
    table = check(
        b"bf00ae80 t $a\t[binfmt_demo]\nbf00ae80 t scan_arg\t[binfmt_demo]\n"
        b"bf00aeec t $d\t[binfmt_demo]\nbf00af00 t $x.7\t[binfmt_demo]\n"
        b"bf00af00 t open_exec\t[binfmt_demo]\nffff800010080000 t $x\n"
        b"ffff800010080000 T _stext\nffff800010081000 T el0_demo\nffff800010081008 d $d",
        {
            0xBF00AE84: "scan_arg+0x4 [binfmt_demo]",
            0xBF00AEF0: "scan_arg+0x70 [binfmt_demo]",
            0xBF00AF08: "open_exec+0x8 [binfmt_demo]",
            0xFFFF80001008100C: "el0_demo+0xc",
        },
    )
    assert table.by_name("$a") == table.by_name("$x.7") == []
    assert table.skipped == 0


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_only_mapping_names_are_dropped(newline: bytes) -> None:
    lines = [
        b"ffff800010081000 t real",
        b"ffff800010081008 t $d.realtime.7",
        b"ffff800010081010 t $dollar_fn",
        b"ffff800010081020 t $a",
    ]
    table = Kallsyms.parse(newline.join(lines))
    assert answer(table, 0xFFFF80001008100C) == "real+0xc"
    assert answer(table, 0xFFFF800010081024) == "$dollar_fn+0x14"
    assert len(table) == 2


def test_padding_before_a_function_is_not_the_function() -> None:
    table = check(
        b"ffffffff81000180 t __pfx_setup_demo\nffffffff81000190 t setup_demo\n"
        b"ffffffff81000460 T __pfx_next_demo\nffffffff81000470 T next_demo\n",
        {
            0xFFFFFFFF81000190: "setup_demo+0x0",
            0xFFFFFFFF81000470: "next_demo+0x0",
            0xFFFFFFFF81000465: "__pfx_next_demo+0x5",
        },
    )
    assert [found.start for found in table.by_name("setup_demo")] == [0xFFFFFFFF81000190]


def test_tab_or_blanks_before_the_module() -> None:
    table = check(
        b"ffffffffc0030000 t bpf_prog_1122334455667788_demo\t[bpf]\n"
        b"ffffffffc0030400 t bpf_prog_99aabbccddeeff00_two      [bpf]\n"
        b"ffffffffc0100000 T fuse_demo        [fuse]\n",
        {
            0xFFFFFFFFC0030001: "bpf_prog_1122334455667788_demo+0x1 [[bpf]]",
            0xFFFFFFFFC0030402: "bpf_prog_99aabbccddeeff00_two+0x2 [[bpf]]",
            0xFFFFFFFFC0100003: "fuse_demo+0x3 [fuse]",
        },
    )
    for name in ("bpf_prog_1122334455667788_demo", "bpf_prog_99aabbccddeeff00_two"):
        (found,) = table.by_name(name)
        assert (found.kind, found.module) == (symbols.BPF_PROG, symbols.BPF_MODULE)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_no_newline_at_the_end_upper_case_and_bit_63(newline: bytes) -> None:
    table = Kallsyms.parse(
        newline.join(
            [
                b"00000000000000EA t write_demo",
                b"A0000000000000CA d table_demo",
                b"A0000000000000FA T bench_demo\t[bench_mod]",
            ]
        )
    )
    assert answer(table, 0xA0000000000000FA) == "bench_demo+0x0 [bench_mod]"
    assert answer(table, 0xA0000000000000CA) == "-"
    assert answer(table, 0xEA) == "-"
    assert [found.start for found in table.by_name("table_demo")] == [0xA0000000000000CA]
    assert [found.start for found in table.by_name("write_demo")] == [0xEA]


def test_pages_of_kprobes_and_ftrace_are_one_page_long() -> None:
    table = check(
        b"ffffffffc0040000 t bpf_prog_0011223344556677_x\t[bpf]\n"
        b"ffffffffc0212000 t ftrace_trampoline\t[__builtin__ftrace]\n"
        b"ffffffffc0213000 t ftrace_trampoline\t[__builtin__ftrace]\n"
        b"ffffffffc00d4000 t kprobe_insn_page\t[__builtin__kprobes]\n"
        b"ffffffffc00d6000 t kprobe_optinsn_page\t[__builtin__kprobes]\n",
        {
            0xFFFFFFFFC0040FFF: "bpf_prog_0011223344556677_x+0xfff [[bpf]]",
            0xFFFFFFFFC0041000: "-",
            0xFFFFFFFFC0212010: "ftrace_trampoline+0x10 [__builtin__ftrace]",
            0xFFFFFFFFC0213FFF: "ftrace_trampoline+0xfff [__builtin__ftrace]",
            0xFFFFFFFFC0214008: "-",
            0xFFFFFFFFC00D4004: "kprobe_insn_page+0x4 [__builtin__kprobes]",
            0xFFFFFFFFC00D5000: "-",
            0xFFFFFFFFC00D6004: "kprobe_optinsn_page+0x4 [__builtin__kprobes]",
        },
        module_sizes={"unrelated": (0xFFFFFFFFC0900000, 4096)},
    )
    assert [found.kind for found in table.by_name("ftrace_trampoline")] == [symbols.OOL] * 2


def test_preferred_names_and_reachable_aliases() -> None:
    table = check(
        b"ffffffff83000000 T _stext\nffffffff83000000 T _text\nffffffff83000000 t pvh_demo\n"
        b"ffffffff83000400 W weak_name\nffffffff83000400 T strong_name\n"
        b"ffffffff83000800 t __do_thing\nffffffff83000800 t do_thing\nffffffff83000c00 T tail\n",
        {
            0xFFFFFFFF83000404: "strong_name+0x4",
            0xFFFFFFFF83000804: "do_thing+0x4",
            0xFFFFFFFF830003FF: "_stext+0x3ff",
        },
    )
    assert table.aliases(0xFFFFFFFF83000010) == ["_stext", "_text", "pvh_demo"]
    assert table.aliases(0xFFFFFFFF83000410) == ["strong_name", "weak_name"]
    assert table.aliases(0xFFFFFFFF82000000) == []
    for name, start in (("weak_name", 0x400), ("__do_thing", 0x800), ("pvh_demo", 0)):
        assert [found.start - 0xFFFFFFFF83000000 for found in table.by_name(name)] == [start]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (b"t local_strong", b"W weak_global"),
        (b"T aglobal", b"t zlocal_and_longer"),
        (b"T irq_entries", b"T __irqentry_text_start"),
        (b"T ___three_underscores_demo", b"T __start___param"),
        (b"T x", b"T _longer"),
        (b"T longer_name", b"T short"),
        (b"T name_a", b"T name_b"),
    ],
)
def test_each_rule_of_preference(better: bytes, worse: bytes) -> None:
    for pair in ((better, worse), (worse, better)):
        text = b"".join(b"ffffffff83000000 %b\n" % name for name in pair)
        assert answer(Kallsyms.parse(text), 0xFFFFFFFF83000000) == better[2:].decode() + "+0x0"


def test_one_name_at_many_addresses() -> None:
    table = check(
        b"ffffffff81100000 t s_next\nffffffff81200000 t s_next\n"
        b"ffffffffc0300000 t s_next\t[demo]\nffffffff81200040 t other\n",
        {
            0xFFFFFFFF81100010: "s_next+0x10",
            0xFFFFFFFF81200010: "s_next+0x10",
            0xFFFFFFFF81200048: "other+0x8",
            0xFFFFFFFFC0300010: "s_next+0x10 [demo]",
        },
    )
    assert [(found.start, found.module) for found in table.by_name("s_next")] == [
        (0xFFFFFFFF81100000, None),
        (0xFFFFFFFF81200000, None),
        (0xFFFFFFFFC0300000, "demo"),
    ]


def test_names_are_verbatim() -> None:
    check(
        b"ffffffff84000000 t ovl_demo.llvm.10133695243223489999\n"
        b"ffffffff84000100 t copy_demo.isra.0\nffffffff84000200 t copy_demo.cold\n"
        b"ffffffff84000300 t copy_demo.part.0.constprop.0\n",
        {
            0xFFFFFFFF84000000: "ovl_demo.llvm.10133695243223489999+0x0",
            0xFFFFFFFF84000101: "copy_demo.isra.0+0x1",
            0xFFFFFFFF84000202: "copy_demo.cold+0x2",
            0xFFFFFFFF84000303: "copy_demo.part.0.constprop.0+0x3",
        },
    )


def test_another_boots_addresses_stay_unresolved() -> None:
    table = check(
        b"ffffffff9d000000 T _text\nffffffff9d000100 T some_fn\n"
        b"ffffffffa0000000 t odd_fn\t[odd]\nffffffffa0000100 d odd_data\t[odd]\n",
        {0xFFFFFFFFB6E0017B: "-", 0xFFFFFFFFA0000108: "-", 0xFFFFFFFF9D0FFFFF: "-"},
    )
    assert table.text_start == 0xFFFFFFFF9D000000


JUNK = (
    b"ffffffff85000000 T ok_one\n\nzzzz T not_hex\nffffffff85000100\nffffffff85000200 T\n"
    b"ffffffff85000300 T ok_two\t\nffffffff85000400 ? odd_type\n"
)


def test_junk_lines_are_skipped_and_counted() -> None:
    table = check(
        JUNK,
        {
            0xFFFFFFFF85000004: "ok_one+0x4",
            0xFFFFFFFF850002FF: "ok_one+0x2ff",
            0xFFFFFFFF85000304: "ok_two+0x4",
            0xFFFFFFFF85000404: "-",
        },
    )
    assert table.skipped == 3
    (found,) = table.by_name("ok_two")
    assert found.module is None


def test_strict_names_the_line() -> None:
    with pytest.raises(KallsymsError, match=r"line 3 .*zzzz T not_hex") as caught:
        Kallsyms.parse(JUNK, strict=True)
    assert caught.value.remedy
    assert len(Kallsyms.parse(b"ffffffff85000000 T ok_one\n", strict=True)) == 1


def test_only_kernel_addresses_can_have_a_name() -> None:
    table = check(
        b"0000000000000000 A __per_cpu_start\n000000000047a000 t odd_low_symbol\n"
        b"0606258d4c544000 t odd_symbol\nffffffffad000000 T _text\n"
        b"ffffffffad036600 T one_fn\nffffffffad135f00 t two_fn\nffffffffae000000 T _etext\n",
        {
            0xFFFFFFFFAD135F6F: "two_fn+0x6f",
            0xFFFFFFFFAD0366FA: "one_fn+0xfa",
            0x47A920: "-",
            0x606258D4C544155: "-",
            0x5966605DD52F8E00: "-",
            1 << 64: "-",
            -1: "-",
        },
    )
    assert table.is_kernel(0xFFFFFFFFAD135F6F)
    for address in (0x47A920, 0x5966605DD52F8E00, 1 << 64):
        assert not table.is_kernel(address)


def test_images_are_bpf_too() -> None:
    table = check(
        b"ffffffffc0040000 t bpf_prog_1111111111111111_prog\t[bpf]\n"
        b"ffffffffc0042000 t bpf_trampoline_6442500001\t[bpf]\n"
        b"ffffffffc0043000 t bpf_trampoline_6442500002_1\t[bpf]\n"
        b"ffffffffc0044000 t bpf_dispatcher_xdp\t[bpf]\n",
        {
            0xFFFFFFFFC004207D: "bpf_trampoline_6442500001+0x7d [[bpf]]",
            0xFFFFFFFFC0043018: "bpf_trampoline_6442500002_1+0x18 [[bpf]]",
            0xFFFFFFFFC0044010: "bpf_dispatcher_xdp+0x10 [[bpf]]",
        },
    )
    for address, kind in (
        (0xFFFFFFFFC0040000, symbols.BPF_PROG),
        (0xFFFFFFFFC004207D, symbols.BPF_TRAMPOLINE),
        (0xFFFFFFFFC0044010, symbols.BPF_DISPATCHER),
    ):
        found = table.find(address)
        assert isinstance(found, symbols.Symbol)
        assert found.kind == kind


def test_the_main_program_is_preferred_to_a_subprogram_at_its_start() -> None:
    table = check(
        b"ffffffffa0257cf8 t bpf_prog_b07c000000000000_F\t[bpf]\n"
        b"ffffffffa02592e0 t bpf_prog_2dce000000000000_F\t[bpf]\n"
        b"ffffffffa0257cf8 t bpf_prog_ae31000000000000__dummy_tracepoi\t[bpf]\n",
        {0xFFFFFFFFA0257D00: "bpf_prog_ae31000000000000__dummy_tracepoi+0x8 [[bpf]]"},
    )
    assert table.aliases(0xFFFFFFFFA0257D00) == [
        "bpf_prog_ae31000000000000__dummy_tracepoi",
        "bpf_prog_b07c000000000000_F",
    ]
    # Listed last decides, not the name's length: turned round, the other one wins.
    turned = Kallsyms.parse(
        b"ffffffffa0257cf8 t bpf_prog_ae31000000000000__dummy_tracepoi\t[bpf]\n"
        b"ffffffffa0257cf8 t bpf_prog_b07c000000000000_F\t[bpf]\n"
    )
    assert answer(turned, 0xFFFFFFFFA0257CF8) == "bpf_prog_b07c000000000000_F+0x0 [[bpf]]"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bpf_prog_30304e82b4033ea3_kprobe__demo", symbols.BPF_PROG),
        ("bpf_prog_30304e82b4033ea3", symbols.BPF_PROG),
        ("bpf_prog_30304e82b4033ea3_a.b.c", symbols.BPF_PROG),
        ("bpf_prog_deadbeef_x", symbols.OTHER_BPF),
        ("bpf__tcp_congestion_ops_init", symbols.BPF_STRUCT_OPS),
    ],
)
def test_kinds_of_bpf_lines(name: str, kind: str) -> None:
    table = Kallsyms.parse(b"ffffffffc0040000 t %b\t[bpf]\n" % name.encode())
    found = table.find(0xFFFFFFFFC0040000)
    assert isinstance(found, symbols.Symbol)
    assert (found.name, found.kind) == (name, kind)


@pytest.mark.parametrize("name", ["bpf_prog_run", "bpf_prog_get_curr_or_next"])
def test_kernel_functions_are_not_bpf(name: str) -> None:
    table = Kallsyms.parse(b"ffffffff81040000 t %b\n" % name.encode())
    found = table.find(0xFFFFFFFF81040000)
    assert isinstance(found, symbols.Symbol)
    assert (found.kind, found.module) == (symbols.KERNEL, None)


C13 = b"ffffffffc0100000 t mod_a\t[a]\nffffffffc0180000 t mod_b\t[b]\n"


def test_a_modules_size_bounds_its_last_symbol() -> None:
    check(
        C13,
        {
            0xFFFFFFFFC01C5754: "-",
            0xFFFFFFFFC0182FFF: "mod_b+0x2fff [b]",
            0xFFFFFFFFC0183000: "-",
            0xFFFFFFFFC0100FFF: "mod_a+0xfff [a]",
            0xFFFFFFFFC0101000: "-",
        },
        module_sizes={"b": (0xFFFFFFFFC0180000, 0x3000)},
    )


def test_without_sizes_one_page_does() -> None:
    check(C13, {0xFFFFFFFFC01C5754: "-", 0xFFFFFFFFC0180FFF: "mod_b+0xfff [b]"})

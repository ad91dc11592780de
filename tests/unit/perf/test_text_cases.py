"""perf script text that misled other tools, each with its right answers."""

from __future__ import annotations

import pytest

from ksym_plugin.perf import text
from ksym_plugin.perf.text import FrameLine, Header
from ksym_plugin.timeline.errors import KsymError
from tests.unit.helpers import load, timeline_of, unload
from tests.unit.texts import TABLE, annotated, folded, folder_of, renamer

ALPHA = b"\tffffffff81000404 alpha+0x4 ([kernel.kallsyms])\n"
UNNAMED = b"\tffffffff81000404 [unknown] ([kernel.kallsyms])\n"


def task(line: bytes) -> tuple[bytes, bytes, bytes]:
    header = text.header(line)
    assert header is not None
    return header.comm, header.pid, header.tid


def frame(line: bytes) -> tuple[bytes, bytes, bytes | None]:
    """Symbol, offset and dso."""
    found = text.frame(line)
    assert isinstance(found, FrameLine)
    return found.name, found.offset, found.dso


def by_table(sample: bytes) -> bytes:
    return annotated(sample, renamer(table=TABLE))


def test_names_of_tasks_hold_blanks_and_numbers() -> None:
    first = b"Pool Worker 7 21528 [003] 609678.457663:     250000 cycles: \n"
    second = b"DB cupd 12 3/4 11320/11322 186448.846888:    1008373 cycles: \n"
    assert task(first) == (b"Pool Worker 7", b"", b"21528")
    assert task(second) == (b"DB cupd 12 3/4", b"11320", b"11322")
    assert folded(first + ALPHA + b"\n" + second + ALPHA + b"\n", tid=True) == {
        "Pool_Worker_7-?/21528;alpha": 250000,
        "DB_cupd_12_3/4-11320/11322;alpha": 1008373,
    }


def test_names_of_tasks_are_numbers_or_nothing() -> None:
    sample = (
        b"77\t1/1\t\t[000] 0.5:\t1 demo_event: x\n\tffffffff81000404 [unknown] (m)\n\n"
        b"    2/2\t\t[000] 0.6:\t1 demo_event: x\n\tffffffff81000404 [unknown] (m)\n\n"
        b"k/[2]  4/4\t\t[000] 0.7:\t1 demo_event: x\n\tffffffff81000404 [unknown] (m)\n"
    )
    headers = [text.header(line) for line in sample.splitlines()[::3]]
    assert [(h.comm, h.pid) for h in headers if h] == [(b"77", b"1"), (b"", b"2"), (b"k/[2]", b"4")]
    named = sample.replace(b"[unknown] (m)", b"alpha+0x4 ([kernel.kallsyms])")
    assert by_table(sample) == named
    assert text.header(b"\xef\xbb\xbf6\t0/0\t\t[000] 0.0:\t1 e: x").comm == b"6"  # type: ignore[union-attr]


def test_files_hold_blanks_and_tasks_parentheses() -> None:
    sample = (
        b"Main() 87296/87296  2489.654687:     250000 task-clock:u: \n"
        b"\t         1902e32 sub_1+0x42 (/games/My Lib/X 4 Found/X4)\n" + ALPHA + b"\t"
        b"ffffffffffffffff [unknown] ([unknown])\n\n"
    )
    assert task(sample.splitlines()[0])[0] == b"Main()"
    assert frame(sample.splitlines()[1])[2] == b"/games/My Lib/X 4 Found/X4"
    assert by_table(sample) == sample
    assert folded(sample) == {"Main();[unknown];alpha;sub_1": 250000}


def test_symbols_hold_anything() -> None:
    lines = (
        b"\t    1234 ns::func<void (unsigned int)>::operator()(int) const+0x1c (/bin/a b)\n"
        b"\t    2234 pkg/syntax.(*p).push+0xa6 (/bin/go)\n"
        b"\t    3234 odd => +0xb (foo.so)\n"
        b"\t    4234 operator new+0x0 (/lib/libx.so)\n"
        b"\t    5234 @plt+0x0 (/lib/libx.so)\n"
    )
    assert [frame(line) for line in lines.splitlines()] == [
        (b"ns::func<void (unsigned int)>::operator()(int) const", b"+0x1c", b"/bin/a b"),
        (b"pkg/syntax.(*p).push", b"+0xa6", b"/bin/go"),
        (b"odd =>", b"+0xb", b"foo.so"),
        (b"operator new", b"+0x0", b"/lib/libx.so"),
        (b"@plt", b"+0x0", b"/lib/libx.so"),
    ]
    assert by_table(b"t 1 5.000000: 1 e: \n" + lines) == b"t 1 5.000000: 1 e: \n" + lines


def test_no_symbol_and_no_file() -> None:
    name = "bpf_prog_00000000000000cc_lookup"
    sample = (
        b"demo 9 [000] 5.000001:     1 cycles: \n"
        b"\tffffffff8127bc2b each_elem_demo+0x7b ([kernel.kallsyms])\n"
        b"\tffffffffc00110a1 +0x25 ()\n"
        b"\tffffffff8121a89a trace_call_demo+0xca ([kernel.kallsyms])\n\n"
    )
    assert frame(sample.splitlines()[2]) == (b"", b"+0x25", b"")
    past = timeline_of(load(0xFFFFFFFFC001107C, 100, name, 7))
    assert annotated(sample, renamer(past)) == sample.replace(
        b"+0x25 ()", name.encode() + b"+0x25 ([bpf])"
    )
    assert annotated(sample) == sample
    (stack,) = folded(sample)
    assert stack == "demo;trace_call_demo;[unknown];each_elem_demo"


def test_files_that_were_deleted() -> None:
    lines = (
        b"\t    7fd40000 [unknown] (/lib/libudev-demo.so (deleted))\n"
        b"\t    7ab2e757f784 [unknown] (/memfd:mapper (deleted))\n"
        b"\t    7ab2e757f799 [unknown] (/ (deleted))\n"
        b"\t    7fdb10 __gettime+0x1 ([vdso])\n"
    )
    assert [frame(line) for line in lines.splitlines()] == [
        (b"[unknown]", b"", b"/lib/libudev-demo.so (deleted)"),
        (b"[unknown]", b"", b"/memfd:mapper (deleted)"),
        (b"[unknown]", b"", b"/ (deleted)"),
        (b"__gettime", b"+0x1", b"[vdso]"),
    ]
    assert by_table(lines) == lines


def test_payloads_of_tracepoints() -> None:
    sample = (
        b"  demo 236193/236193 [021] 1.791544:          1    block:rq_demo: 259,76 R 4096 ()"
        b" 57622160 + 8 [demo] ffffffff81000404 [unknown] ([kernel.kallsyms])\n"
        b"  f  9566 [001] 18490161.191159: kmem:kfree: call_site=ffffffff81092295 ptr=(nil)\n"
    )
    events = [text.header(line).event for line in sample.splitlines()]  # type: ignore[union-attr]
    assert events == [b"block:rq_demo", b"kmem:kfree"]
    assert by_table(sample) == sample.replace(b"[unknown]", b"alpha+0x4")
    assert folded(sample, renamer(table=TABLE)) == {"demo;alpha": 1}
    assert folded(sample, event=b"kmem:kfree") == {"f": 1}


def test_a_blank_line_below_the_header_and_none_at_the_end() -> None:
    sample = (
        b"java 1 9.5:   101 cpu-clock:\n\n" + UNNAMED + b"\t    7f89e341d84f write_demo+0x4f"
        b" (/usr/lib/libc.so)"
    )
    assert by_table(sample) == sample.replace(b"[unknown]", b"alpha+0x4")
    assert folded(sample) == {"java;write_demo;[[kernel.kallsyms]]": 101}


def test_junk_inside_a_stack() -> None:
    sample = (
        b"demo 26037  8801.194312:     250000 cpu-clock:uhH:\n"
        + UNNAMED
        + b"\t          NOT_A_FRAME_LINE\n"
        + UNNAMED
        + b"\n"
    )
    by = renamer(table=TABLE)
    assert annotated(sample, by) == sample.replace(b"[unknown]", b"alpha+0x4")
    assert by.tally.unparsed == 1
    assert folder_of(sample).sums.unparsed == 1


def test_no_time_and_frames_at_column_0() -> None:
    sample = (
        b"java 19983 cycles:\nffffffff8103d0ca wrmsr_demo ([kernel.kallsyms])\n"
        b"7f7241fbe6d8 demo::base(Type) const (/opt/x/libjvm.so)\n\n"
        b"cafe 77 cycles:\nffffffff8103d0ca wrmsr_demo ([kernel.kallsyms])\n\n"
    )
    assert folded(sample) == {"java;demo::base;wrmsr_demo": 1, "cafe;wrmsr_demo": 1}
    assert by_table(sample) == sample


def test_offsets_that_are_garbage() -> None:
    sample = (
        b"demo  4152 75695.008912:       3646 cycles:u: \n"
        b"\t          7d9750 fault_demo+0xfe200000 ([kernel.kallsyms])\n"
        b"\t             d70 _start+0xffff018fd5dce000 (/usr/lib/ld-2.24.so)\n"
        b"\t             7d8 conntrack_demo+0x7f8f80b8 ([nf_demo])\n\n"
    )
    assert frame(sample.splitlines()[1])[:2] == (b"fault_demo", b"+0xfe200000")
    assert by_table(sample) == sample
    assert folded(sample, kernel=True) == {"demo;conntrack_demo_[k];_start;fault_demo_[k]": 3646}


def test_addresses_relative_to_vmlinux() -> None:
    sample = (
        b"dd 29776 666709.771979:   10101010 cpu-clock: \n"
        b"\t          414b3b notify_demo (/lib/modules/4.1.0-demo/build/vmlinux)\n"
        b"\t          968f6e [unknown] (/lib/modules/4.1.0-demo/build/vmlinux)\n"
        b"\t           e5f70 read (/lib/x/libc.so)\n\n"
    )
    assert by_table(sample) == sample
    assert folded(sample, kernel=True) == {"dd;read;[vmlinux]_[k];notify_demo_[k]": 10101010}


def test_inlined_functions() -> None:
    sample = (
        b"demo 20602  2217.581907:    2925420 cycles:uppp: \n"
        b"\tffffffff81000504 [unknown] ([kernel.kallsyms])\n"
        b"\tffffffff81000410 inner_demo (inlined)\n"
        b"\tffffffff81000410 outer_demo+0x10 ([kernel.kallsyms])\n"
        b"\t    7f443cc8af43 __mmap_demo (inlined)\n\n"
    )
    assert by_table(sample) == sample.replace(b"[unknown]", b"beta+0x4")
    (stack,) = folded(sample)
    assert stack == "demo;__mmap_demo;outer_demo;inner_demo;[[kernel.kallsyms]]"


def test_all_of_the_kernel_is_unknown() -> None:
    sample = (
        b"swapper     0 [001] 202513.231817:    1001001 cpu-clock: \n"
        b"\tffffffff81000404 [unknown] ([kernel.kallsyms])\n"
        b"\tffffffff81000504 [unknown] ([unknown])\n"
    )
    others = (
        b"\t          47a920 [unknown] ([unknown])\n"
        b"\t 606258d4c544155 [unknown] ([unknown])\n"
        b"\t5966605dd52f8e00 [unknown] ([unknown])\n\n"
    )
    table = TABLE + b"5966605dd52f8000 T not_a_kernel\n000000000047a000 T nor_this\n"
    assert annotated(sample + others, renamer(table=table)) == (
        sample.replace(b"404 [unknown]", b"404 alpha+0x4").replace(
            b"[unknown] ([unknown])", b"beta+0x4 ([kernel.kallsyms])"
        )
        + others
    )


def test_guests() -> None:
    sample = (
        b":17006 17006 [001] 11500.262869216:          1 cycles: \n"
        b"\tffffffff81000404 [unknown] ([guest.kernel.kallsyms])\n"
        b"\tffffffff81000404 [unknown] ([guest.kernel.kallsyms.4242])\n" + UNNAMED + b"\n"
    )
    assert task(sample.splitlines()[0]) == (b":17006", b"", b"17006")
    assert task(b":-1    -1 [000] 1.000000: 1 e: ") == (b":-1", b"", b"-1")
    *others, last, blank = by_table(sample).splitlines()
    assert (last, blank) == (ALPHA.strip(b"\n"), b"")
    assert others == sample.splitlines()[:3]


def test_side_band_records_are_no_samples() -> None:
    sample = (
        b"swapper     0 [000]     0.000000: PERF_RECORD_KSYMBOL ksymbol event with addr"
        b" ffffffffc0ef971d len 229 type 1 flags 0x0 name bpf_prog_2a142ef600000000\n"
        b"swapper     0 [000]     1.000000: PERF_RECORD_KSYMBOL addr ffffffffc01bc362 len 229"
        b" type 1 flags 0x0 name bpf_prog_7be49e3900000000_demo\n"
        b"systemd     0 [000]     0.000000: PERF_RECORD_COMM: systemd:1/1\n"
        b"swapper     0 [000]     3.000000:          1 cycles: ffffffffc01bc370 [unknown]"
        b" ([unknown])\n"
    )
    assert [text.header(line) is None for line in sample.splitlines()] == [True, True, True, False]
    assert folded(sample) == {"swapper;[unknown]": 1}
    assert folder_of(sample).sums.unparsed == 0
    name = "bpf_prog_7be49e3900000000_demo"
    past = timeline_of(
        load(0xFFFFFFFFC01BC362, 229, name, 1_000_000_000),
        unload(0xFFFFFFFFC01BC362, 2_000_000_000),
        load(0xFFFFFFFFC01BC300, 0x200, "bpf_prog_00000000000000dd", 10_000_000_000),
    )
    early = sample.replace(b" 3.000000:", b" 1.500000:")
    assert f"{name}+0xe ([bpf])".encode() in annotated(early, renamer(past))
    late = sample.replace(b" 3.000000:", b" 9.000000:")
    assert annotated(late, renamer(past)) == late.replace(b"([unknown])", b"([bpf])")


def test_several_events() -> None:
    sample = (
        b"noploop 21796 [001] 10.984841: instructions: \n"
        b"\tffffffff81000404 alpha ([kernel.kallsyms])\n\n"
        b"noploop 21796 [001] 10.984850: 50 cache-misses/period=50/u: \n"
        b"\t             993 main (/root/noploop)\n\n"
    )
    assert by_table(sample) == sample
    assert folded(sample) == {"noploop;alpha": 1}
    assert folded(sample + sample[sample.index(b"\n\n") + 2 :]) == {"noploop;main": 100}
    assert folded(sample, event=b"cache-misses/period=50/u") == {"noploop;main": 50}
    sums = folder_of(sample).sums
    assert sums.counts.others(b"instructions") == (
        "only instructions (1 sample) is counted; --event takes another:"
        " cache-misses/period=50/u (1 sample)"
    )
    with pytest.raises(KsymError, match="take one of: instructions, cache"):
        folded(sample, event=b"cycles")


def test_bytes_that_are_no_utf_8() -> None:
    sample = (
        b"caf\xc3 77 [000] 1.5:   1 cycles: \n" + UNNAMED + b"\t    4010 caml\xadfun_1+0x2"
        b" (/x/p\xe9rf)\n\n"
    )
    assert by_table(sample) == sample.replace(b"[unknown]", b"alpha+0x4")
    assert list(folder_of(sample).sums.lines(b"cycles")) == [
        b"caf\xc3;caml\xadfun_1;[[kernel.kallsyms]] 1\n"
    ]


def test_how_the_kernel_s_files_are_spelled() -> None:
    sample = (
        b"t 1 5.000000: 1 e: \n"
        b"\tffffffff81aebbfe start_demo ([kernel.kallsyms].init.text)\n"
        b"\tffffffffc087cbc9 rx_demo+0xa9 (/lib/modules/5.4/kernel/drivers/net/x_core.ko.xz)\n"
        b"\tffffffffb8f03eaa net_demo+0x13a (/usr/lib/debug/boot/vmlinux-5.4.14-demo)\n"
        b"\tffffffffc09ace93 bpf_prog_2b95000000000000_lb+0xb80 (bpf_prog_2b95000000000000_lb)\n"
        b"\t          401000 main (/opt/kernel-tools/bin/x)\n\n"
    )
    assert by_table(sample) == sample
    (stack,) = folded(sample, kernel=True)
    assert stack == (
        "t;main;bpf_prog_2b95000000000000_lb_[k];net_demo_[k];rx_demo_[k];start_demo_[k]"
    )


def test_header_blocks_and_stray_messages() -> None:
    sample = (
        b"# ========\n# captured on    : Sat Sep  4 10:27:47 2021\n"
        b"# cmdline : /usr/bin/perf record -e cycles -a -- sleep 1 \n# ========\n#\n"
        b"The demo.data data has no samples!\n"
        b"swapper     0 [001]     5.000001:          1 cycles: \n" + UNNAMED + b"\n"
    )
    assert by_table(sample) == sample.replace(b"[unknown]", b"alpha+0x4")
    assert folded(sample) == {"swapper;[[kernel.kallsyms]]": 1}


def test_a_task_whose_name_begins_like_a_comment() -> None:
    sample = b"#1 worker    77 [000]     5.000001:          1 cycles: \n" + UNNAMED + b"\n"
    assert by_table(sample) == sample.replace(b"[unknown]", b"alpha+0x4")
    assert folded(sample, renamer(table=TABLE)) == {"#1_worker;alpha": 1}


def test_semicolons_in_java_s_names() -> None:
    line = b"\t7f722d119786 Ldemo/io/Out;::write->Ldemo/Enc;::enc+0x4b (/tmp/perf-19982.map)\n"
    sample = b"java 1 5.000000: 1 e: \n" + line + b"\n"
    assert by_table(sample) == sample
    assert folded(sample) == {"java;demo/io/Out:::write;demo/Enc:::enc_[i]": 1}
    assert folded(sample.replace(b"java", b"jvm"), jit=True) == {
        "jvm;Ldemo/io/Out:::write_[j];Ldemo/Enc:::enc_[i]": 1
    }


def test_a_header_is_a_header() -> None:
    assert isinstance(text.parse(b"cafe 77 [000] 5.000000: 1 e: f (x)", False), Header)
    assert isinstance(text.parse(b"\t           cafe 77 [000] 5.0: 1 e: f (x)", False), FrameLine)

/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Tells user space of every BPF symbol that comes or goes: kprobes, or fentry with
 * KSYM_FENTRY, on bpf_ksym_add() and bpf_ksym_del(). Compiled by BCC.
 *
 * KSYM_RING_PAGES   pages of one ring buffer for all CPUs; without it, perf buffers
 * KSYM_NAME_SIZE    of struct bpf_ksym's name
 * KSYM_PROG_AT      where struct bpf_ksym has its flag "prog"
 * KSYM_ID_AT        where a program's id is, counted from its struct bpf_ksym
 *
 * The last three are from the kernel's BTF; without them names are cut at 512, and nothing
 * is known of programs. The kernel's linux/bpf.h is of no help: bcc has one of its own in
 * its place, and then the kernel's does not compile.
 *
 * Records are of the length of their names: a program's takes about 100 bytes, where the
 * longest name takes 568. ksym_plugin/sources/probe_records.py reads them.
 */
#include <uapi/linux/ptrace.h>

#define KSYM_ADD 0
#define KSYM_DEL 1

#ifndef KSYM_NAME_SIZE
#define KSYM_NAME_SIZE 512
#endif

/* How the kernel's begins. */
struct bpf_ksym {
	unsigned long start;
	unsigned long end;
	char name[KSYM_NAME_SIZE];
};

struct record {
	u64 stamp;  /* CLOCK_MONOTONIC, in ns */
	u64 start;
	u32 length;
	u32 seq;    /* of this CPU and kind, from 1 */
	u32 id;     /* the program's, 0 where it has none (yet, or any more) */
	u32 pid;    /* whoever loads or unloads: the process, and the thread */
	u32 tid;
	u16 cpu;
	u8 kind;
	u8 is_prog; /* as opposed to an image; 0 too where that is not known */
	char comm[16];
	char name[KSYM_NAME_SIZE];
};

/*
 * Numbers and counts are per CPU and kind of change. So nobody else writes them: a program
 * does not run again on a CPU on which it is running (the kernel sees to that), while the
 * other one might, in between. It also means that records of a stream come in the order
 * of their numbers, and a number that is missing is lost for certain.
 */
struct stream {
	u64 seq;
	u64 lost;
	u64 lost_images; /* of these, those that bpf(2) does not list */
};

BPF_PERCPU_ARRAY(streams, struct stream, 2);
/* A record does not fit on the stack of a BPF program, which has 512 bytes. */
BPF_PERCPU_ARRAY(scratch, struct record, 2);

#ifdef KSYM_RING_PAGES
BPF_RINGBUF_OUTPUT(events, KSYM_RING_PAGES);
#else
BPF_PERF_OUTPUT(events);
#endif

/* The record's symbol; how long its name is, with the NUL. */
static __always_inline u64 read_symbol(struct record *record, struct bpf_ksym *ksym)
{
	unsigned long range[2] = {};
	u64 length;

	bpf_probe_read_kernel(range, sizeof(range), ksym);
	record->start = range[0];
	record->length = range[1] - range[0];
	record->is_prog = 0;
	record->id = 0;
#ifdef KSYM_PROG_AT
	bpf_probe_read_kernel(&record->is_prog, sizeof(record->is_prog),
			      (void *)ksym + KSYM_PROG_AT);
#endif
#ifdef KSYM_ID_AT
	/* A program's symbol is part of its struct bpf_prog_aux. */
	if (record->is_prog)
		bpf_probe_read_kernel(&record->id, sizeof(record->id), (void *)ksym + KSYM_ID_AT);
#endif
	length = (u32)bpf_probe_read_kernel_str(record->name, sizeof(record->name),
						 (void *)ksym + offsetof(struct bpf_ksym, name));
	/* One register for what is compared and what is used, or the verifier is lost. */
	asm volatile("" : "+r"(length));
	return length > sizeof(record->name) ? 0 : length;
}

static __always_inline int tell(void *ctx, struct bpf_ksym *ksym, int kind)
{
	struct stream *stream = streams.lookup(&kind);
	struct record *record = scratch.lookup(&kind);
	u64 task = bpf_get_current_pid_tgid();
	u64 name;

	if (!stream || !record)
		return 0;
	name = read_symbol(record, ksym);
	/* The main program of one with subprograms has two symbols, and one is never used. */
	if (!record->start)
		return 0;
	/* In this order: what is not counted yet is stamped later. */
	record->seq = ++stream->seq;
	record->stamp = bpf_ktime_get_ns();
	record->pid = task >> 32;
	record->tid = task;
	record->cpu = bpf_get_smp_processor_id();
	record->kind = kind;
	bpf_get_current_comm(record->comm, sizeof(record->comm));
#ifdef KSYM_RING_PAGES
	if (!events.ringbuf_output(record, offsetof(struct record, name) + name, 0))
		return 0;
#else
	if (!events.perf_submit(ctx, record, offsetof(struct record, name) + name))
		return 0;
#endif
	stream->lost++;
	if (!record->is_prog)
		stream->lost_images++;
	return 0;
}

#ifdef KSYM_FENTRY
KFUNC_PROBE(bpf_ksym_add, struct bpf_ksym *ksym)
{
	return tell(ctx, ksym, KSYM_ADD);
}

KFUNC_PROBE(bpf_ksym_del, struct bpf_ksym *ksym)
{
	return tell(ctx, ksym, KSYM_DEL);
}
#else
int ksym_add(struct pt_regs *ctx)
{
	return tell(ctx, (struct bpf_ksym *)PT_REGS_PARM1(ctx), KSYM_ADD);
}

int ksym_del(struct pt_regs *ctx)
{
	return tell(ctx, (struct bpf_ksym *)PT_REGS_PARM1(ctx), KSYM_DEL);
}
#endif

// Five functions: a main one, static and global ones, names longer than 15 characters.
typedef unsigned long long u64;
typedef unsigned int u32;

struct __sk_buff {
	u32 len;
};

static __attribute__((noinline)) u64 mix_hash_rounds_static_long(u64 hash, u32 round)
{
	for (int step = 0; step < 16; step++) {
		hash ^= hash >> 29;
		hash *= 0xbf58476d1ce4e5b9ULL + round;
	}
	return hash;
}

static __attribute__((noinline)) u64 fold(u64 hash)
{
	return (hash >> 32) ^ hash;
}

__attribute__((noinline)) u64 classify_payload_global_long(u64 seed)
{
	u64 hash = mix_hash_rounds_static_long(seed, 3);

	if (hash & 1)
		hash += fold(hash);
	return hash;
}

__attribute__((noinline)) u64 tail(u64 seed)
{
	return fold(seed) * 3;
}

__attribute__((section("socket"), used)) int classify_ingress_traffic_main(struct __sk_buff *skb)
{
	u64 hash = skb->len;

#pragma unroll
	for (int round = 0; round < 4; round++)
		hash = classify_payload_global_long(hash + round);
	return (int)tail(hash);
}

char gpl[] __attribute__((section("license"), used)) = "GPL";

// Selection on keys: a radix select per expert, on the keys and then, where equal keys are cut, on pair ids; and a stable compaction.

struct SelectParameters {
    // [pairs]
    const i32* ids;
    const u32* keys;
    // [experts]; by key, and by complement of the pair id among equal keys.
    uint4* cuts;
    uint4* ties;
    // [experts, 2^bits]
    u32* counts;
    // Kept pairs of each block, then where they go; behind the last, where they end.
    u32* blocks;
    // Per expert the largest key that is not kept.
    u32* next;
    u32* kept;
    u64 pairs;
    u64 experts;
    // The bits of this round: their lowest, their number, and whether there were none before.
    u64 low;
    u64 bits;
    u64 is_first;
    // Complements of pair ids are taken within this mask.
    u64 pair_mask;
    u64 block_count;
};

// A cut. x: bits of the boundary found so far; y: how many of what has them are to be kept, from the largest; z: how many have them;
// w: what is to be done, one of these. From KEEP_EQUAL on, the boundary is looked for.
constexpr u32 KEEP_NONE = 0;
constexpr u32 KEEP_ALL = 1;
constexpr u32 KEEP_EQUAL = 2;
constexpr u32 KEEP_SOME_EQUAL = 3;
constexpr u32 DROP_EQUAL = 4;

constexpr u32 PER_THREAD = 4;
constexpr u32 WARPS = THREADS / LANES;
// Stands for no count.
constexpr u64 NO_COUNT = ~0ull;

// Which count a value goes to, if it has the bits found so far.
__device__ __forceinline__ u64 count_of(const SelectParameters& p, u32 expert, u32 value, u32 prefix) {
    const u32 low = u32(p.low);
    const u32 bits = u32(p.bits);
    if (!p.is_first && value >> (low + bits) != prefix) {
        return NO_COUNT;
    }
    return (u64(expert) << bits) + ((value >> low) & ((1u << bits) - 1));
}

// Adds 1 to the counts that the threads of a warp name, once for those that name the same.
__device__ __forceinline__ void count(u32* counts, u64 at) {
    const u32 peers = __match_any_sync(ALL_LANES, at);
    if (at != NO_COUNT && lane() == u32(__ffs(peers)) - 1) {
        atomicAdd(&counts[at], u32(__popc(peers)));
    }
}

// The sum of the values of the threads of the block before this one; of all threads for `all`.
__device__ __forceinline__ u32 sum_before(u32 value, u32& all) {
    __shared__ u32 warps[WARPS];
    u32 sum = value;
    for (u32 distance = 1; distance < LANES; distance *= 2) {
        const u32 other = __shfl_up_sync(ALL_LANES, sum, distance);
        sum += lane() >= distance ? other : 0;
    }
    if (lane() == LANES - 1) {
        warps[threadIdx.x / LANES] = sum;
    }
    __syncthreads();
    u32 before = sum - value;
    all = 0;
    for (u32 warp = 0; warp < WARPS; warp += 1) {
        before += warp < threadIdx.x / LANES ? warps[warp] : 0;
        all += warps[warp];
    }
    __syncthreads();
    return before;
}

__device__ __forceinline__ bool is_kept(const SelectParameters& p, u32 expert, u32 key, u32 pair) {
    const uint4 cut = p.cuts[expert];
    if (cut.w <= KEEP_ALL) {
        return cut.w == KEEP_ALL;
    }
    if (key != cut.x || cut.w == DROP_EQUAL) {
        return key > cut.x;
    }
    return cut.w == KEEP_EQUAL || pair <= (p.ties[expert].x ^ u32(p.pair_mask));
}

// Experts and keys of the pairs from `first` on that a thread compacts; past the last expert where there is none.
struct Few {
    u32 experts[PER_THREAD];
    u32 keys[PER_THREAD];
};

__device__ __forceinline__ Few few(const SelectParameters& p, u64 first) {
    Few few;
    if (first + PER_THREAD <= p.pairs) {
        const uint4 ids = *reinterpret_cast<const uint4*>(p.ids + first);
        const uint4 keys = *reinterpret_cast<const uint4*>(p.keys + first);
        return {{ids.x, ids.y, ids.z, ids.w}, {keys.x, keys.y, keys.z, keys.w}};
    }
    for (u32 i = 0; i < PER_THREAD; i += 1) {
        const bool there = first + i < p.pairs;
        few.experts[i] = there ? u32(p.ids[first + i]) : ~0u;
        few.keys[i] = there ? p.keys[first + i] : 0;
    }
    return few;
}

extern "C" {

// Counts keys by expert and bucket.
__global__ void __launch_bounds__(THREADS) count_keys(const SelectParameters p) {
    const u64 pair = thread_number();
    const u32 expert = pair < p.pairs ? u32(p.ids[pair]) : ~0u;
    u64 at = NO_COUNT;
    if (expert < p.experts) {
        const uint4 cut = p.cuts[expert];
        if (cut.w >= KEEP_EQUAL) {
            at = count_of(p, expert, p.keys[pair], cut.x);
        }
    }
    count(p.counts, at);
}

// Counts pairs whose key is the boundary by the complement of their ids: the smallest id is the largest.
__global__ void __launch_bounds__(THREADS) count_ties(const SelectParameters p) {
    const u64 pair = thread_number();
    const u32 expert = pair < p.pairs ? u32(p.ids[pair]) : ~0u;
    u64 at = NO_COUNT;
    if (expert < p.experts) {
        const uint4 cut = p.cuts[expert];
        if (cut.w == KEEP_SOME_EQUAL && p.keys[pair] == cut.x) {
            at = count_of(p, expert, u32(pair) ^ u32(p.pair_mask), p.ties[expert].x);
        }
    }
    count(p.counts, at);
}

// Per expert, one a block, the bucket of the item that is last kept; refines the cuts.
__global__ void __launch_bounds__(THREADS) descend(const SelectParameters p) {
    const u64 expert = blockIdx.x;
    const u32 per_thread = (1u << p.bits) / THREADS;
    const u32* counts = p.counts + (expert << p.bits);
    // Read by all threads before one of them writes it.
    uint4 cut = p.cuts[expert];
    // From the largest bucket down.
    const u32 last = (THREADS - threadIdx.x) * per_thread - 1;
    u32 sum = 0;
    for (u32 i = 0; i < per_thread; i += 1) {
        sum += counts[last - i];
    }
    u32 all;
    u32 before = sum_before(sum, all);
    if (cut.w < KEEP_EQUAL || cut.y <= before || cut.y > before + sum) {
        return;
    }
    u32 bucket = last;
    while (cut.y > before + counts[bucket]) {
        before += counts[bucket];
        bucket -= 1;
    }
    cut.x = (cut.x << p.bits) | bucket;
    cut.y -= before;
    cut.z = counts[bucket];
    p.cuts[expert] = cut;
}

// On one rank: where equal keys are cut, the first pairs are kept.
__global__ void __launch_bounds__(THREADS) start_ties(const SelectParameters p) {
    const u64 expert = thread_number();
    if (expert >= p.experts) {
        return;
    }
    const uint4 cut = p.cuts[expert];
    const bool tied = cut.w >= KEEP_EQUAL && cut.z > cut.y;
    if (tied) {
        p.cuts[expert].w = KEEP_SOME_EQUAL;
    }
    p.ties[expert] = make_uint4(0, cut.y, 0, tied ? KEEP_SOME_EQUAL : KEEP_NONE);
}

// Counts the kept pairs of each block, and finds the largest keys that are not kept.
__global__ void __launch_bounds__(THREADS) count_kept(const SelectParameters p) {
    const u64 first = thread_number() * PER_THREAD;
    const Few pairs = few(p, first);
    u32 sum = 0;
    for (u32 i = 0; i < PER_THREAD; i += 1) {
        const u32 expert = pairs.experts[i];
        const u32 key = pairs.keys[i];
        if (expert >= p.experts) {
            continue;
        }
        if (is_kept(p, expert, key, u32(first + i))) {
            sum += 1;
        } else if (key > p.next[expert]) {
            atomicMax(&p.next[expert], key);
        }
    }
    u32 all;
    sum_before(sum, all);
    if (threadIdx.x == 0) {
        p.blocks[blockIdx.x] = all;
    }
}

// One block: counts of blocks to where each block begins; the sum of all after the last.
__global__ void __launch_bounds__(THREADS) place_blocks(const SelectParameters p) {
    u32 start = 0;
    for (u64 first = 0; first < p.block_count; first += THREADS) {
        const u64 block = first + threadIdx.x;
        u32 all;
        const u32 before = sum_before(block < p.block_count ? p.blocks[block] : 0, all);
        if (block < p.block_count) {
            p.blocks[block] = start + before;
        }
        start += all;
    }
    if (threadIdx.x == 0) {
        p.blocks[p.block_count] = start;
    }
}

// Writes the ids of the kept pairs, ascending.
__global__ void __launch_bounds__(THREADS) write_kept(const SelectParameters p) {
    const u64 first = thread_number() * PER_THREAD;
    const Few pairs = few(p, first);
    u32 sum = 0;
    bool kept[PER_THREAD];
    for (u32 i = 0; i < PER_THREAD; i += 1) {
        const u32 expert = pairs.experts[i];
        kept[i] = expert < p.experts && is_kept(p, expert, pairs.keys[i], u32(first + i));
        sum += kept[i];
    }
    u32 all;
    u32 to = p.blocks[blockIdx.x] + sum_before(sum, all);
    for (u32 i = 0; i < PER_THREAD; i += 1) {
        if (kept[i]) {
            p.kept[to] = u32(first + i);
            to += 1;
        }
    }
}

}

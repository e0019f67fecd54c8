// What the emulator must do, and must report.

struct ProbeParameters {
    u32* values;
    u64 count;
};

extern "C" {

// A barrier that only some threads come to.
__global__ void probe_divergent_barrier(const ProbeParameters p) {
    if (threadIdx.x < p.count) {
        __syncthreads();
    }
}

// Two barriers, each for some threads.
__global__ void probe_two_barriers(const ProbeParameters p) {
    if (threadIdx.x < p.count) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

// An exchange that only some of its lanes come to.
__global__ void probe_divergent_exchange(const ProbeParameters p) {
    if (threadIdx.x < p.count) {
        p.values[threadIdx.x] = __shfl_xor_sync(ALL_LANES, threadIdx.x, 1);
    }
}

// Values past the end.
__global__ void probe_out_of_bounds(const ProbeParameters p) {
    p.values[p.count + threadIdx.x] = 1;
}

// Each thread's value becomes that of the thread before it in the block, through shared memory.
__global__ void probe_shared(const ProbeParameters p) {
    __shared__ u32 values[THREADS];
    values[threadIdx.x] = p.values[thread_number()];
    __syncthreads();
    p.values[thread_number()] = values[(threadIdx.x + THREADS - 1) % THREADS];
}

// A place past 2^32 elements.
__global__ void probe_place(const ProbeParameters p) {
    if (thread_number() == 0) {
        *reinterpret_cast<u64*>(p.values) = place(p.count, p.count, 3);
    }
}

}

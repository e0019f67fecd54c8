// The kernels, by name.

#pragma once

#include "device.h"

#include "../common.cuh"
#include "../exact.cuh"
// Of this file alone, as AddressSanitizer guards no variable that files may share.
namespace {
namespace norm {
#include "../norm.cu"
}
namespace score {
#include "../score.cu"
}
namespace keys {
#include "../keys.cu"
}
namespace select_ {
#include "../select.cu"
}
namespace weights {
#include "../weights.cu"
}
namespace compact {
#include "../compact.cu"
}
namespace activation {
#include "../ffn/activation.cu"
}
namespace product_ {
#include "../ffn/product.cu"
}
namespace tensor {
#include "../ffn/tensor.cu"
}
namespace probe {
#include "probe.cu"
}
}

namespace emu {

struct Kernel {
    const char* name;
    size_t parameter_bytes;
    void (*run)(const void* parameters);
};

template <auto KERNEL>
struct Entry;

template <class Parameters, void (*KERNEL)(Parameters)>
struct Entry<KERNEL> {
    static constexpr size_t BYTES = sizeof(Parameters);
    static void run(const void* parameters) {
        KERNEL(*static_cast<const Parameters*>(parameters));
    }
};

#define KERNEL(space, name) {#name, Entry<space::name>::BYTES, Entry<space::name>::run}

const Kernel KERNELS[] = {
    KERNEL(norm, squared_norms),
    KERNEL(norm, squared_norms_bf16),
    KERNEL(score, scan_factors),
    KERNEL(score, squared_scores),
    KERNEL(keys, method_keys),
    KERNEL(keys, score_keys),
    KERNEL(select_, count_keys),
    KERNEL(select_, count_ties),
    KERNEL(select_, descend),
    KERNEL(select_, start_ties),
    KERNEL(select_, count_kept),
    KERNEL(select_, place_blocks),
    KERNEL(select_, write_kept),
    KERNEL(weights, selection_weights),
    KERNEL(compact, gather),
    KERNEL(compact, put),
    KERNEL(compact, scatter_add),
    KERNEL(compact, scatter_add_bf16),
    KERNEL(compact, combine),
    KERNEL(compact, combine_bf16),
    KERNEL(compact, narrow),
    KERNEL(activation, activate),
    KERNEL(activation, activate_bf16),
    KERNEL(activation, differentiate),
    KERNEL(activation, differentiate_bf16),
    KERNEL(activation, scale_rows),
    KERNEL(activation, scale_rows_bf16),
    KERNEL(product_, project),
    KERNEL(product_, project_back),
    KERNEL(product_, weight_gradients),
    KERNEL(tensor, project_bf16),
    KERNEL(tensor, project_back_bf16),
    KERNEL(tensor, weight_gradients_bf16),
    KERNEL(probe, probe_divergent_barrier),
    KERNEL(probe, probe_two_barriers),
    KERNEL(probe, probe_divergent_exchange),
    KERNEL(probe, probe_out_of_bounds),
    KERNEL(probe, probe_shared),
    KERNEL(probe, probe_place),
};

}

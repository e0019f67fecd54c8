#!/usr/bin/env python3
"""A peer of scripts/bench: one SwiGLU MoE layer in PyTorch on CPU, forward and backward.

Two formulations of the same layer: `loop` takes one expert after the other, with index_select, two linears and index_add; `grouped` sorts the
rows by expert and takes them through grouped_mm. A process measures one of them in one setting, so that its peak of memory is its own, and
prints one JSON line. Needs torch (pip install torch==2.13.0).
"""
import argparse
import json
import pathlib
import statistics
import time

import torch
from torch.nn import functional

from peer_select import draw_experts

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Loop:
    """Weights of each expert on their own: gradients of a stacked tensor would be as large as all experts together, for every expert."""

    def __init__(self, experts, width, hidden, dtype):
        def matrices(outputs, inputs):
            return [torch.empty(outputs, inputs, dtype=dtype).normal_(0, 0.02).requires_grad_() for _ in range(experts)]

        self.gate_up, self.down = matrices(2 * hidden, width), matrices(width, hidden)
        self.weights = self.gate_up + self.down

    def __call__(self, x, experts, p):
        y = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down)):
            token, slot = (experts == expert).nonzero(as_tuple=True)
            if len(token):
                gate, up = functional.linear(x.index_select(0, token), gate_up).chunk(2, dim=1)
                out = functional.linear(functional.silu(gate) * up, down)
                y = y.index_add(0, token, out * p[token, slot].unsqueeze(1))
        return y


class Grouped:
    """All experts in one product."""

    def __init__(self, experts, width, hidden, dtype):
        def stacked(outputs, inputs):
            return torch.empty(experts, outputs, inputs, dtype=dtype).normal_(0, 0.02).requires_grad_()

        self.gate_up, self.down = stacked(2 * hidden, width), stacked(width, hidden)
        self.weights = [self.gate_up, self.down]

    def __call__(self, x, experts, p):
        pairs = experts.flatten()
        by_expert = pairs.argsort(stable=True)
        token = by_expert // experts.shape[1]
        ends = torch.bincount(pairs, minlength=len(self.down)).cumsum(0).to(torch.int32)
        gate, up = functional.grouped_mm(x.index_select(0, token), self.gate_up.mT, offs=ends).chunk(2, dim=1)
        out = functional.grouped_mm(functional.silu(gate) * up, self.down.mT, offs=ends)
        return torch.zeros_like(x).index_add(0, token, out * p.flatten()[by_expert].unsqueeze(1))


def memory(name):
    """Bytes of this process by the system's name for them."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def canary():
    """GFLOP/s of a product that fits in the caches, on all threads: shows when they share a core."""
    a = torch.ones(512, 512)
    torch.mm(a, a)
    flop, start = 0, time.perf_counter()
    while time.perf_counter() - start < 0.2:
        torch.mm(a, a)
        flop += 2 * 512**3
    return round(flop / (time.perf_counter() - start) / 1e9, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=["loop", "grouped"], default="loop")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    for name, default in [("tokens", 4096), ("experts", 128), ("top-k", 8), ("width", 2048), ("hidden", 768), ("reps", 3), ("threads", 2)]:
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument("--zipf", type=float, default=0.0, metavar="S")
    o = parser.parse_args()

    torch.set_num_threads(o.threads)
    torch.manual_seed(1)
    dtype = DTYPES[o.dtype]
    layer = {"loop": Loop, "grouped": Grouped}[o.way](o.experts, o.width, o.hidden, dtype)
    experts = draw_experts(o.tokens, o.experts, o.top_k, o.zipf, torch.default_generator).view(o.tokens, o.top_k)
    p = torch.randn(o.tokens, o.top_k).softmax(1).to(dtype).requires_grad_()
    x = torch.randn(o.tokens, o.width).to(dtype).requires_grad_()
    dy = (0.01 * torch.randn(o.tokens, o.width)).to(dtype)

    def forward():
        with torch.no_grad():
            layer(x, experts, p)

    def both():
        layer(x, experts, p).backward(dy)

    def seconds(run):
        for leaf in [x, p, *layer.weights]:
            leaf.grad = None
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    canaries = [canary()]
    before = memory("VmRSS:")
    seconds(both)
    gradients = sum(weights.nbytes for weights in layer.weights)
    forwards, boths = [], []
    for _ in range(o.reps):
        forwards.append(seconds(forward))
        boths.append(seconds(both))
        canaries.append(canary())
    gflop = 18 * o.tokens * o.top_k * o.width * o.hidden / 1e9
    median = statistics.median
    print(json.dumps({
        "peer": f"torch {o.way}", "torch": torch.__version__, "dtype": o.dtype, "tokens": o.tokens, "zipf": o.zipf, "threads": o.threads,
        "forward_s": round(median(forwards), 4), "forward_gflops": round(gflop / 3 / median(forwards), 1),
        "forward_backward_s": round(median(boths), 4), "forward_backward_best_s": round(min(boths), 4),
        "forward_backward_gflops": round(gflop / median(boths), 1), "canary_gflops": canaries,
        "step_bytes": memory("VmHWM:") - before - gradients,
    }), flush=True)


if __name__ == "__main__":
    main()

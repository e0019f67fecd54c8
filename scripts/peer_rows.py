#!/usr/bin/env python3
"""A peer of scripts/bench: rows of an MoE layer from place to place, in PyTorch on CPU.

`permute` is index_select(out=) of tokens to rows by expert, `compact half` the same of half of the pairs, `compact half of rows` takes half of the
rows by expert, and `combine` adds rows to their tokens with index_add_, without weights, into zeros. Outputs are reused. One JSON line each,
with the median seconds. Needs torch (pip install torch==2.13.0).
"""
import argparse
import json

import torch

from peer_ffn import DTYPES, canary
from peer_select import draw_experts, median_seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    for name, default in [("tokens", 16384), ("experts", 128), ("top-k", 8), ("width", 2048), ("reps", 7), ("threads", 2)]:
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument("--zipf", type=float, default=0.0, metavar="S")
    o = parser.parse_args()

    torch.set_num_threads(o.threads)
    torch.manual_seed(1)
    x = torch.randn(o.tokens, o.width).to(DTYPES[o.dtype])
    by_expert = draw_experts(o.tokens, o.experts, o.top_k, o.zipf, torch.default_generator).argsort(stable=True)
    token = by_expert // o.top_k
    rows = x.index_select(0, token)
    kept = (torch.rand(len(token)) < 0.5).nonzero().flatten()
    kept_token, half, y = token[kept], rows[kept], torch.zeros_like(x)
    works = {
        "permute": lambda: torch.index_select(x, 0, token, out=rows),
        "compact half": lambda: torch.index_select(x, 0, kept_token, out=half),
        "compact half of rows": lambda: torch.index_select(rows, 0, kept, out=half),
        "combine": lambda: y.zero_().index_add_(0, token, rows),
    }
    for work, run in works.items():
        before = canary()
        seconds = median_seconds(run, o.reps)
        print(json.dumps({
            "peer": "torch", "work": work, "dtype": o.dtype, "tokens": o.tokens, "rows": len(token), "width": o.width, "zipf": o.zipf,
            "threads": o.threads, "seconds": round(seconds, 6), "canary_gflops": [before, canary()],
        }), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()

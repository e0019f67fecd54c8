#!/usr/bin/env python3
"""The peer of scripts/bench: selection in PyTorch on CPU.

Keeps, per expert, the half of its pairs with the largest scores: 65,536 tokens, 8 of 128 experts each. Three formulations, checked to keep the
same number; one JSON line for each, with the median seconds. Needs torch (pip install torch==2.13.0).
"""
import argparse
import json
import statistics
import time

import torch


def draw_experts(tokens, experts, top_k, zipf, generator):
    """Distinct experts for each token; expert e has weight (e + 1) ** -zipf (Gumbel top-k)."""
    weight = -zipf * torch.arange(1, experts + 1).log()
    gumbel = -torch.log(torch.empty(tokens, experts).exponential_(generator=generator))
    return (weight + gumbel).topk(top_k, dim=1).indices.flatten()


def formulations(expert, score, experts):
    load = torch.bincount(expert, minlength=experts)
    quota, first = load // 2, load.cumsum(0) - load

    def first_of_each(order):
        """A mask of the pairs that come first in the order, which is by expert."""
        sorted_expert = expert[order]
        place = torch.arange(len(expert)) - first[sorted_expert]
        return torch.empty(len(expert), dtype=torch.bool).index_copy_(0, order, place < quota[sorted_expert])

    def two_sorts():
        by_score = score.argsort(descending=True)
        return first_of_each(by_score[expert[by_score].argsort(stable=True)])

    def one_key_sort():
        # The bits of a positive float ascend with it: expert above, complement of the score below.
        key = expert << 32 | 0x7FFFFFFF - score.view(torch.int32).to(torch.int64)
        return first_of_each(key.argsort())

    def topk_per_expert():
        kept = torch.zeros(len(expert), dtype=torch.bool)
        groups = expert.argsort(stable=True).split(load.tolist())
        for pairs, q in zip(groups, quota.tolist()):
            kept[pairs[score[pairs].topk(q, sorted=False).indices]] = True
        return kept

    return two_sorts, one_key_sort, topk_per_expert


def median_seconds(run, repeats):
    def once():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return statistics.median([once() for _ in range(repeats + 2)][2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--repeats", type=int, default=7, help="repetitions of each formulation (default 7)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokens, experts, top_k = 65536, 128, 8
    for zipf in (0.0, 1.0):
        generator = torch.Generator().manual_seed(1)
        expert = draw_experts(tokens, experts, top_k, zipf, generator)
        score = torch.rand(tokens * top_k, generator=generator)
        ways = formulations(expert, score, experts)
        counts = {int(way().sum()) for way in ways}
        if len(counts) != 1:
            raise SystemExit(f"the formulations keep {sorted(counts)} pairs")
        for way in ways:
            seconds = round(median_seconds(way, options.repeats), 6)
            work = "select " + way.__name__.replace("_", " ")
            print(json.dumps({"peer": "torch", "work": work, "seconds": seconds, "zipf": zipf}), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()

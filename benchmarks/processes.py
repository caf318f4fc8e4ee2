"""Seconds of a Hessian product over all samples, by one process and by two that share it, on one thread each.

    python benchmarks/processes.py --samples 512

Wall time is that of the machine as it is; process time per rank says what it would be on a core for every process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any


def measured(arguments: argparse.Namespace) -> None:
    """In every process: print the seconds per product, wall and process time."""
    import torch
    import torch.distributed as dist

    import landscape
    from landscape.curvature.operator import Curvature
    from landscape.curvature.sample_means import over_all_samples
    from landscape.curvature.vectors import random_unit
    from landscape.subject.process_group import process_group

    torch.set_num_threads(1)
    options: dict[str, Any] = {"split": "train", "batch_size": 16, "device": "cpu", "seed": 0}
    with process_group() as processes:
        torch.manual_seed(0)
        loaded = landscape.load(None, model=arguments.model, data="digits", samples=arguments.samples, **options)
        subject = replace(loaded, processes=processes)
        product = over_all_samples(subject, Curvature(subject, subject.parameters, "kept"))
        vector = random_unit(subject.size, 0, device=subject.device, dtype=subject.dtype)
        product(vector)
        if processes.size > 1:
            dist.barrier()
        wall, own = time.perf_counter(), time.process_time()
        for _ in range(arguments.products):
            vector = product(vector)
            vector /= vector.norm()
        found = [(time.perf_counter() - wall) / arguments.products, (time.process_time() - own) / arguments.products]
        print(json.dumps(found), flush=True)


def run(processes: int, words: list[str]) -> tuple[float, float]:
    """Wall time of the slowest of so many processes, and its process time, in seconds per product."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*start, __file__, *words, "--worker"], check=True, text=True, stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = [json.loads(pair) for pair in re.findall(r"\[[^]]*\]", done.stdout)]  # perhaps two on one line
    assert len(found) == processes
    return max(wall for wall, _ in found), max(own for _, own in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet_demo")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--products", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measured(arguments)
        return
    pairs = [(run(1, sys.argv[1:]), run(2, sys.argv[1:])) for _ in range(arguments.rounds)]
    for what, at in (("wall time", 0), ("process time", 1)):
        one, two = (statistics.median(pair[count][at] for pair in pairs) for count in (0, 1))
        ratio = statistics.median(pair[0][at] / pair[1][at] for pair in pairs)
        print(
            f"{what}: {one:.2f} s by one process, {two:.2f} s by two, ratio {ratio:.2f} (median of {len(pairs)} pairs)"
        )
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()

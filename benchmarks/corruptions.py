"""Measure how many images of 32 px per second and core each generated corruption makes.

    python benchmarks/corruptions.py

The images are smooth random ones. Process time of one thread, the quickest of three rounds, mean over the
five severities; needs the extra `corruptions`.
"""

from __future__ import annotations

import time

import torch

from landscape.data.corruptions import SETS, SEVERITIES, corrupted, maker

IMAGES, SIZE, ROUNDS = 40, 32, 3


def images_per_second(name: str, images: torch.Tensor) -> float:
    seconds = 0.0
    for severity in SEVERITIES:
        rounds = []
        for _ in range(ROUNDS):
            began = time.process_time()
            corrupted(images, name, severity, seed=0)
            rounds.append(time.process_time() - began)
        seconds += min(rounds)
    return len(SEVERITIES) * len(images) / seconds


def main() -> None:
    torch.set_num_threads(1)
    coarse = torch.rand(IMAGES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(coarse, size=SIZE, mode="bicubic").clamp(0, 1)
    images = (255 * smooth).round().to(torch.uint8)
    rates = {name: images_per_second(name, images) for name in SETS["all"]}
    print(f"{maker()}, {SIZE} px\n\n| corruption | images per second and core |\n| --- | --- |")
    for name, rate in sorted(rates.items(), key=lambda row: row[1]):
        print(f"| {name} | {rate:,.0f} |")


if __name__ == "__main__":
    main()

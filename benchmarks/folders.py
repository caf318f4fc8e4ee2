"""Image folders at the scale of ImageNet: seconds to list files and select samples, images decoded per second.

Synthetic JPEG images (quality 75, 500 x 375 pixels as in ImageNet) in a temporary folder; the listed files are empty.
"Plain loop" is Pillow alone, one image after the other, as a Dataset without workers. The variants alternate, and the
best round counts.

    python benchmarks/folders.py [--files 1281167] [--pictures 400] [--rounds 3]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from landscape.data import image_folder
from landscape.data.decoding import Picture, decoded, pixels
from landscape.data.sampling import subset

CLASSES = 1000
SIZE = 224


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1_281_167, help="empty files to list")
    parser.add_argument("--pictures", type=int, default=400, help="images to decode")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        listing(Path(place), options.files, options.rounds)
    with tempfile.TemporaryDirectory() as place:
        decoding(Path(place), options.pictures, options.rounds)


def listing(root: Path, files: int, rounds: int) -> None:
    numbers = np.arange(files) % CLASSES
    for i in range(CLASSES):
        (root / f"n{i:08}").mkdir()
    for i, number in enumerate(numbers):
        (root / f"n{number:08}" / f"n{number:08}_{i}.JPEG").touch()

    def listed() -> None:
        entries = [f"{root}/{entry}" for entry in image_folder._folders(root)]
        assert sum(len(image_folder._pictures(entry)) for entry in entries) == files

    print(f"list {files:,} files in {CLASSES:,} folders: {best(listed, rounds):.2f} s")
    print(f"choose 1,024 of them, class-balanced: {best(lambda: subset(numbers, 1024), rounds):.2f} s")


def decoding(root: Path, count: int, rounds: int) -> None:
    generator = np.random.default_rng(0)
    paths = [str(root / f"{i}.jpg") for i in range(count)]
    for path in paths:  # smooth with some grain: files of some 60 kB
        coarse = Image.fromarray(generator.integers(256, size=(12, 16, 3), dtype=np.uint8)).resize((500, 375))
        grain = generator.normal(0, 12, size=(375, 500, 3))
        Image.fromarray(np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8)).save(path, quality=75)
    print(f"pictures of {np.mean([Path(path).stat().st_size for path in paths]) / 1000:.0f} kB")

    def plain() -> np.ndarray:
        inputs = np.empty((count, 3, SIZE, SIZE), np.uint8)
        for i, path in enumerate(paths):
            with Image.open(path) as image:
                inputs[i] = pixels(image, SIZE)
        return inputs

    def threaded(threads: int) -> np.ndarray:
        pictures = (Picture(i, path, path) for i, path in enumerate(paths))
        return decoded(pictures, name="pictures", count=count, of=count, size=SIZE, threads=threads)

    ways: dict[str, Callable[[], np.ndarray]] = {"plain loop": plain}
    ways |= {f"{threads} threads": lambda threads=threads: threaded(threads) for threads in (1, 2, 4, 6)}
    took = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            took[name] = min(took[name], best(way, 1))
    np.testing.assert_array_equal(plain(), threaded(2))
    for name, seconds in took.items():
        print(f"{name:12} {count / seconds:6.0f} images/s  {took['plain loop'] / seconds:.2f}x")


def best(work: Callable[[], object], rounds: int) -> float:
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return min(took)


if __name__ == "__main__":
    main()

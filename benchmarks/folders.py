"""Image folders at the scale of ImageNet: seconds to list (empty) files and select samples, images decoded per second.

Synthetic JPEG images (quality 75, 500 x 375 pixels as in ImageNet) in a temporary folder; the listed files are empty.
"Plain loop" is Pillow alone, one image after the other, as a Dataset without workers. The variants alternate, and the
best round counts.

    python benchmarks/folders.py [--files 1281167] [--pictures 400] [--rounds 3]
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
from measuring import Work, in_turns, parser
from PIL import Image

from landscape.data import image_folder
from landscape.data.decoding import Picture, decoded, pixels
from landscape.data.sampling import subset

CLASSES = 1000
SIZE = 224


def main() -> None:
    options = parser(__doc__, files=1_281_167, pictures=400, rounds=3).parse_args()
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

    took = best({"list": listed, "choose": lambda: subset(numbers, 1024)}, rounds)
    print(f"list {files:,} files in {CLASSES:,} folders: {took['list']:.2f} s")
    print(f"choose 1,024 of them, class-balanced: {took['choose']:.2f} s")


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

    ways: dict[str, Work] = {"plain loop": plain}
    ways |= {f"{threads} threads": lambda threads=threads: threaded(threads) for threads in (1, 2, 4, 6)}
    took = best(ways, rounds)
    np.testing.assert_array_equal(plain(), threaded(2))
    for name, seconds in took.items():
        print(f"{name:12} {count / seconds:6.0f} images/s  {took['plain loop'] / seconds:.2f}x")


def best(ways: dict[str, Work], rounds: int) -> dict[str, float]:
    return {name: min(times) for name, times in in_turns(ways, rounds, time.perf_counter).items()}


if __name__ == "__main__":
    main()

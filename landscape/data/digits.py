"""Load the embedded data set of 1,797 handwritten digits.

"Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak 1998, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, CC BY 4.0; the file is the copy that scikit-learn distributes (see digits.md).
"""

import gzip
from importlib import resources

import numpy as np
import torch
import torch.nn.functional as F

from landscape.data import dataset, sampling

SIDE = 8
LEVELS = 16  # pixels count dots of a 4 x 4 block: 0..16
TEST = 360
MEAN = (0.3056,) * 3  # of the train split
STD = (0.3186,) * 3


def grey() -> tuple[np.ndarray, np.ndarray]:
    """The content of the file: images (1797, 8, 8) in 0..16 and labels (1797,)."""
    packed = resources.files("landscape.data").joinpath("digits.csv.gz").read_bytes()
    rows = np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",", dtype=np.int64)
    return rows[:, :-1].reshape(-1, SIDE, SIDE), rows[:, -1]


def load(split: sampling.Split) -> dataset.Images:
    """Digits as (N, 3, 16, 16) uint8: grey / 16 * 255, enlarged twice (bilinear), rounded, channel repeated.

    The last 360 rows of the fixed seeded order are the test split, the 1,437 before them the train split.
    """
    pixels, labels = grey()
    order = sampling.shuffled(len(labels))
    rows = order[-TEST:] if split == "test" else order[:-TEST]
    small = torch.from_numpy(pixels[rows]).unsqueeze(1) / LEVELS * 255
    large = F.interpolate(small, scale_factor=2, mode="bilinear", align_corners=False)
    inputs, targets = large.round().to(torch.uint8).repeat(1, 3, 1, 1), torch.from_numpy(labels[rows])
    return dataset.Images(inputs, targets, "digits", 10, 2 * SIDE, MEAN, STD)

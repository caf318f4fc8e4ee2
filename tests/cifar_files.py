"""Write CIFAR-10's test images as its files hold them."""

import pickle
from pathlib import Path

import numpy as np


def write_test_images(root: Path, pictures: np.ndarray, classes: np.ndarray) -> Path:
    """Write pictures (N, 32, 32, 3) uint8 with their classes (N,) as the test split; return the root."""
    (root / "cifar-10-batches-py").mkdir()
    rows = pictures.transpose(0, 3, 1, 2).reshape(len(pictures), -1)
    batch = {b"data": rows, b"labels": classes.tolist()}
    (root / "cifar-10-batches-py/test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    return root

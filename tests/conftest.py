"""One thread for torch: the tests' networks are too small to share, and waiting for a busy core costs seconds."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

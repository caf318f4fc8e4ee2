"""Machines with an accelerator, simulated or real, and a tiny network for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from simulated_accelerator import Simulation
from simulated_cuda import simulated_cuda

import landscape
from landscape.subject.subject import Subject

REAL = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KINDS = ["simulated", pytest.param("cuda", marks=REAL)]
SIZES = {"vit_demo": {"dim": 12, "depth": 1, "heads": 2, "patch": 4}, "resnet_demo": {"width": 4, "blocks": (1, 1)}}


@contextlib.contextmanager
def machine(kind: str) -> Iterator[Simulation | None]:
    """A machine with an accelerator; its simulation unless it is real."""
    if kind == "cuda":
        yield None
        return
    with simulated_cuda() as simulation:
        yield simulation


def subject_on(device: str, model: str = "vit_demo", **options: Any) -> Subject:
    """A tiny network with random weights, on three mini-batches of 5, 5 and 2 samples."""
    given = {"samples": 12, "batch_size": 5, "model_arg": SIZES[model], **options}
    return landscape.load(None, model=model, data="digits", device=device, **given)


ZERO = 1e-12  # a quantity whose largest value is below is rounding, and its differences are left as they are


def differences(one: xr.Dataset, other: xr.Dataset) -> dict[str, float]:
    """Largest difference of every quantity, relative to its largest value."""
    found = {}
    for name in one.data_vars:
        a, b = one[name].values, other[name].values
        if a.dtype.kind == "f":
            assert (np.isnan(a) == np.isnan(b)).all(), name
            scale = np.abs(a[np.isfinite(a)]).max(initial=0.0)
            scale = scale if scale > ZERO else 1.0
            apart = np.subtract(a, b, where=a != b, out=np.zeros_like(a))  # equal infinities are no difference
            found[str(name)] = float(np.nan_to_num(np.abs(apart)).max(initial=0.0) / scale)
    return found

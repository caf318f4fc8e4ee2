"""Random vectors by a hash of seed and position: fixed bits, any part, and the moments of independent numbers."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2, norm
from simulated_cuda import simulated_cuda
from torch import Tensor, nn

import landscape
from landscape import random_vectors
from landscape.random_vectors import COLUMNS, hashed_columns, normal, signs, uniform, words

CPU = torch.device("cpu")
KINDS: dict[str, Callable[..., Tensor]] = {"signs": signs, "normal": normal, "uniform": uniform}
LENGTH = 5 * COLUMNS + 1003  # more than a row of either, and an incomplete one
DIGESTS = {  # of the first LENGTH entries with the seed 7, which results depend on
    "signs": "9a351c1ba55af921",
    "normal": "3a16951a49c93bfa",
    "uniform": "e25671b5368024c1",
}
FEW_SIGMA = 4.5  # of statistics with fixed seeds


def drawn(kind: str, size: int = LENGTH, seed: int = 7, **given: Any) -> Tensor:
    return KINDS[kind](size, seed, **{"device": CPU, "dtype": torch.float32, **given})


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_never_change(kind: str) -> None:
    whole = drawn(kind)
    assert hashlib.sha256(whole.numpy().astype("<f4").tobytes()).hexdigest()[:16] == DIGESTS[kind]
    assert torch.equal(drawn(kind, dtype=torch.float64), whole.double())
    assert torch.equal(drawn(kind, dtype=torch.bfloat16), whole.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_that_of_the_whole(kind: str) -> None:
    whole = drawn(kind)
    ends = (0, 1, 1000, COLUMNS - 1, COLUMNS, 3 * COLUMNS + 17, 4 * COLUMNS, 4 * COLUMNS + 5, LENGTH)
    for start, stop in itertools.pairwise(ends):
        assert torch.equal(drawn(kind, stop - start, start=start), whole[start:stop])
        assert torch.equal(drawn(kind, stop), whole[:stop])
    assert torch.equal(drawn(kind, LENGTH - 999, start=999), whole[999:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_makes_the_same_bits_and_asks_the_host_for_nothing(kind: str) -> None:
    with simulated_cuda() as simulation:
        there = drawn(kind, device=torch.device("cuda:0"))
        assert there.device == torch.device("cuda:0")
        assert sum(size for _, size in simulation.uploads) <= 2 * 4096  # the tables, for the rows and for the rest
        assert simulation.operations < 120
        assert not simulation.waits
        assert not simulation.draws
        assert torch.equal(there.cpu(), drawn(kind))


# The first one is a test of every day, the others belong to a campaign.
OVER_WEIGHTS: dict[str, dict[str, Any]] = {
    "trace": {"vectors": 4, "hvp": "double-backward"},
    "hessian": {"top": 1, "batches": 1, "max_products": 8, "hvp": "double-backward"},
    "density": {"vectors": 1, "steps": 3, "hvp": "double-backward"},
    "flatness": {"steps": 1, "draws": 4, "vectors": 2, "hvp": "double-backward"},
    "noise-scale": {"groups": 3},
    "step": {"optimizer": "sgd", "optimizer_arg": ("lr=0.1",)},
    "surface": {"resolution": "3"},
    "line": {"resolution": 3},
    "sensitivity": {"bits": "4", "vectors": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "probe", [pytest.param(p, marks=[pytest.mark.campaign] * (p != next(iter(OVER_WEIGHTS)))) for p in OVER_WEIGHTS]
)
def test_no_vector_over_the_weights_is_drawn_on_the_host_or_copied_to_a_device(probe: str) -> None:
    """Nothing above 1 % of such a vector; the weights of the module themselves are copied once."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 512), nn.Tanh(), nn.Linear(512, 10)).eval()
    data = torch.randn(24, 3, 8, 8), torch.arange(24) % 10
    with simulated_cuda() as simulation:
        subject = landscape.load(module.to("cuda"), data=data, batch_size=8, device="cuda")
        simulation.uploads.clear()
        simulation.host_draws.clear()
        landscape.measure(probe, subject, out=None, quiet=True, **OVER_WEIGHTS[probe])
        most = 0.01 * 4 * subject.size
        assert {line: size for line, size in simulation.uploads if size > most} == {}
        assert {line: size for line, size in simulation.host_draws if size > most} == {}


def test_the_tables_have_the_moments_of_normal_numbers_up_to_the_ninth() -> None:
    tables = 2 * random_vectors._tables().double()
    assert torch.equal(tables, -tables.flip(1))  # odd moments are 0
    for power, expected in ((2, 1), (4, 3), (6, 15), (8, 105)):
        np.testing.assert_allclose(tables.pow(power).mean(dim=1), expected, rtol=1e-5)
    parity = (tables / 2 / random_vectors.UNIT) % 2
    assert parity.unique(dim=1).tolist() == [[1.0], [0.0], [0.0], [0.0]]  # their sum is odd, never 0
    assert tables.sum(dim=0).max() / 2 / random_vectors.UNIT < 2**24  # exact in single precision


def test_the_distribution_of_normal_numbers_is_as_the_page_says() -> None:
    size, width = 2**19, 2.0**-15
    spectrum = np.ones(size // 2 + 1, complex)
    for table in random_vectors._tables().double().numpy():
        cells = np.rint(table / width).astype(int) % size
        spectrum *= np.fft.rfft(np.bincount(cells, minlength=size) / 256)
    share = np.fft.fftshift(np.fft.irfft(spectrum, size))
    at = (np.arange(size) - size // 2) * width
    cumulative = share.cumsum() - share / 2
    assert np.abs(cumulative - norm.cdf(at)).max() < 2e-5
    beyond = {limit: 2 * share[at > limit].sum() / (2 * norm.sf(limit)) for limit in (3, 4, 5)}
    assert beyond == pytest.approx({3: 1.0, 4: 1.0, 5: 1.0}, rel=0.022)
    assert {limit: beyond[limit] for limit in (3, 4)} == pytest.approx({3: 1.0, 4: 1.0}, rel=0.0055)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_have_the_moments_of_their_distribution(kind: str) -> None:
    moments = {"signs": (1, 1, 1), "normal": (1, 3, 15), "uniform": (1 / 3, 1 / 5, 1 / 7)}[kind]
    values = drawn(kind, dtype=torch.float64)
    n = len(values)
    for power, expected in zip((2, 4, 6), moments, strict=True):
        error = values.pow(power).std() / n**0.5
        assert abs(values.pow(power).mean() - expected) <= FEW_SIGMA * error + 1e-7
        assert abs(values.pow(power - 1).mean()) < FEW_SIGMA * values.pow(power - 1).std() / n**0.5


@pytest.mark.parametrize("kind", KINDS)
def test_positions_and_seeds_are_not_correlated(kind: str) -> None:
    values = drawn(kind, dtype=torch.float64)
    values /= values.square().mean().sqrt()
    lags = (1, 2, 3, 4, 7, 8, 16, 255, 256, 257, 4096, COLUMNS // 2, COLUMNS - 1, COLUMNS, COLUMNS + 1, 3 * COLUMNS)
    pairs = [(values[:-lag], values[lag:]) for lag in lags]
    pairs += [(values, drawn(kind, seed=seed, dtype=torch.float64)) for seed in (6, 8, 7 + 2**32, 2**62)]
    pairs += [(values, drawn(other, dtype=torch.float64)) for other in KINDS if other != kind]
    for left, right in pairs:
        for a, b in ((left, right), (left.square(), right.square()), (left.pow(3), right)):
            a, b = a - a.mean(), b - b.mean()
            size = (a.square().sum() * b.square().sum() / len(a)).sqrt()
            assert abs(torch.dot(a, b)) <= FEW_SIGMA * size + 1e-9


def test_pairs_of_bytes_of_words_are_equally_frequent() -> None:
    """A serial test: of the same word, of neighbours and of those whose columns or rows differ in one bit."""
    table = words(3, torch.arange(16), hashed_columns(COLUMNS, torch.arange(1)))
    table ^= (table >> 16) & 0xFFFF
    high, low = ((table >> shift & 255).long() for shift in (24, 8))
    pairs = [(high, low), (high[:, :-1], high[:, 1:]), (high[:-1], high[1:])]
    for bit in (0, 3, 7, 11, 15):
        halves = high.view(16, -1, 2, 2**bit)
        pairs.append((halves[:, :, 0], halves[:, :, 1]))
    for one, other in pairs:
        counts = torch.bincount((256 * one + other).reshape(-1), minlength=2**16).double()
        statistic = (counts - counts.mean()).square().sum().item() / counts.mean().item()
        assert 1e-4 < chi2.sf(statistic, 2**16 - 1) < 1 - 1e-4


@pytest.mark.parametrize("kind", ["signs", "normal"])
def test_quadratic_forms_have_the_variance_of_the_estimators(kind: str) -> None:
    """Of v' A v over 8,000 seeds: 2 |A|^2 for normal vectors, and without the diagonal for signs (Hutchinson)."""
    n, count = 12, 8000
    matrix = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = matrix + matrix.T
    # One row of a vector for each seed: a word depends on both in the same way.
    table = words(11, torch.arange(count), hashed_columns(n, torch.arange(1)))
    entries = random_vectors._signs(table, 1) if kind == "signs" else random_vectors._normal(table, 1)
    rows = entries[0].double()
    forms = ((rows @ matrix) * rows).sum(dim=1)
    square = 2 * (matrix.square().sum() - (matrix.diagonal().square().sum() if kind == "signs" else 0))
    error = forms.std() / count**0.5
    assert abs(forms.mean() - matrix.trace()) < FEW_SIGMA * error
    spread = (forms - forms.mean()).square()
    assert abs(spread.mean() - square) < FEW_SIGMA * spread.std() / count**0.5

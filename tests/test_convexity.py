"""The convexity probe: both ends of known Hessians over a plane, and of a dense one at displaced weights."""

import numpy as np
import pytest
import torch
import xarray as xr
from analytic import dense_hessian, quadratic, run_probe, same_state, state, symmetric, tanh_net

from landscape.plots.figures import convexity as convexity_figure
from landscape.probes.convexity import Convexity
from landscape.probes.surface import Surface
from landscape.weight_space.planes import plane_of
from landscape.weight_space.weights_in_place import WeightsInPlace


def test_a_quadratic_has_the_same_ratio_everywhere() -> None:
    subject = quadratic(symmetric([4.0, 3.0, 1.0, -0.5, -1.0, -3.0]), weight=torch.ones(2, 3))
    found = run_probe(Convexity(resolution="3,2", tol=1e-6), subject)
    np.testing.assert_allclose(found["largest"], 4.0, rtol=1e-9)
    np.testing.assert_allclose(found["smallest"], -3.0, rtol=1e-9)
    np.testing.assert_allclose(found["ratio"], 0.75, rtol=1e-9)
    assert (found["ratio_bound"] < 1e-5).all()
    assert (found["converged"] == 1).all()
    decayed = run_probe(Convexity(resolution="2"), quadratic(symmetric([4.0, 1.0, -1.0]), weight_decay=0.5))
    np.testing.assert_allclose(decayed["ratio"], 0.5 / 4.5, rtol=1e-9)  # weight decay shifts both ends


@pytest.mark.slow
def test_the_ends_are_those_of_the_dense_hessian_at_each_point_on_the_plane_of_surface() -> None:
    probe, subject = Convexity(resolution="3", range="0.8", tol=1e-8, seed=2), tanh_net(sizes=(6, 4))
    before = state(subject.model)
    found = run_probe(probe, subject)
    assert same_state(subject.model, before)
    same = run_probe(Surface(resolution="3", range="0.8", seed=2), subject)
    np.testing.assert_allclose(found["loss"], same["loss"], rtol=1e-14)
    plane = plane_of(subject, "random", normalize="filter", ignore=probe.ignore, seed=2)
    with WeightsInPlace(subject, plane.directions[0]) as weights:
        for i, x in enumerate(found["x"]):
            for j, y in enumerate(found["y"]):
                weights.translate((plane.directions[0], float(x)), (plane.directions[1], float(y)))
                dense = 0.6 * dense_hessian(subject, 0) + 0.4 * dense_hessian(subject, 1)
                values = torch.linalg.eigvalsh(dense)
                assert found["largest"][i, j] == pytest.approx(values[-1].item(), rel=1e-6)
                assert found["smallest"][i, j] == pytest.approx(values[0].item(), rel=1e-6)
                ratio = abs(values[0] / values[-1]).item()
                assert abs(found["ratio"][i, j] - ratio) <= found["ratio_bound"][i, j] + 1e-9
    assert np.ptp(found["ratio"]) > 0.05


def test_a_search_that_is_cut_short_says_so_and_its_bound_covers_the_truth() -> None:
    probe, subject = Convexity(resolution="2", range="0:1", max_products=4), tanh_net()
    found = run_probe(probe, subject, units=1)
    values = torch.linalg.eigvalsh((dense_hessian(subject, 0) + dense_hessian(subject, 1)) / 2)
    assert found["converged"][0, 0] == 0
    assert found["matvecs"][0, 0] <= 4
    assert abs(found["largest"][0, 0] - values[-1].item()) <= found["largest_residual"][0, 0]
    assert np.isnan(found["ratio"][1]).all()


def test_infinite_curvature_is_a_point_without_a_ratio() -> None:
    subject = tanh_net()
    with torch.no_grad():
        subject.parameters["2.weight"].mul_(1e308)
    found = run_probe(Convexity(resolution="2", range="0:9"), subject)
    assert (found["done"] == 1).all()
    assert np.isnan(found["ratio"][1, 1])


def test_colours_are_of_the_logarithm_of_the_ratio_so_that_one_huge_ratio_hides_no_other() -> None:
    ratio = np.array([[0.01, 0.1], [1.0, 1e5]])
    coordinates, plane = {"x": [0.0, 1.0], "y": [0.0, 1.0]}, ("x", "y")
    values = {"ratio": (plane, ratio), "converged": (plane, np.ones((2, 2)))}
    data = xr.Dataset(values, coordinates, {"plane": "random"})
    norm = convexity_figure._norm([data])
    assert norm(np.array([0.01, 0.1, 1.0])).tolist() == pytest.approx([0.0, 0.2, 0.4])
    assert norm(1e5) == 1.0

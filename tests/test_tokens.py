"""Tokens by t-SNE (groups stay together, places follow from the seed) and by principal axes around self-attention."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from analytic import attention_net, convolution_net, passage, run_probe

import landscape
from landscape.layers.attention_statistics import attended_layers, on_principal_axes, tokens_around
from landscape.plots import drawing
from landscape.probe import NotApplicable
from landscape.probes.tokens import Tokens
from landscape.results import reader
from landscape.results.headline_numbers import measured
from landscape.subject.loading.identity import digest

PRINCIPAL = Tokens(images=5, method="principal", depths="0,1")
SKLEARN = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")


@pytest.mark.slow
@SKLEARN
def test_tokens_of_an_image_lie_together_where_the_image_decides_them() -> None:
    """Maps that are one vector per image with a little noise: the nearest token of every token is of its image."""
    torch.manual_seed(0)
    maps = torch.randn(4, 6, 1, 1, dtype=torch.float64) + 0.01 * torch.randn(4, 6, 4, 4, dtype=torch.float64)
    probe = Tokens(images=4, perplexity=5.0, layers=("^maps$",))
    found = run_probe(probe, passage(maps, batch_size=3))
    placed = found["position"][0].reshape(64, 2)
    distance = np.linalg.norm(placed[:, None] - placed[None], axis=2) + 1e9 * np.eye(64)
    assert (distance.argmin(axis=1) // 16 == np.arange(64) // 16).all()
    again = run_probe(probe, passage(maps, batch_size=2))
    np.testing.assert_array_equal(again["position"], found["position"])
    assert found["divergence"][0] >= 0


@pytest.mark.slow
@SKLEARN
def test_layers_are_those_nearest_to_the_depths() -> None:
    subject = attention_net()
    plan = Tokens(images=6, perplexity=2.0, depths="0,0.6").plan(subject)
    assert plan.labels["name"][1].tolist() == ["patch_embedding", "blocks.0.attention"]
    assert ", 6 samples, " in str(plan.facts["protocol"])  # those that are drawn, of 12
    assert len(Tokens(images=6, perplexity=2.0, layers=("blocks.0",)).plan(subject).over["layer"]) > 1


@SKLEARN
def test_bad_questions_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"4 images have 16 tokens at .*, t-SNE needs more than its perplexity of 20"):
        Tokens(images=4).plan(attention_net())
    with pytest.raises(NotApplicable, match="--method principal needs layers of self-attention"):
        run_probe(PRINCIPAL, convolution_net())
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(ValueError, match=r"tokens needs scikit-learn .* pip install 'landscape-probes\[tsne\]'"):
        Tokens(images=6, perplexity=2.0).plan(attention_net())


# Principal axes


def test_tokens_that_move_alike_are_common_and_those_that_cancel_are_not() -> None:
    random = np.random.default_rng(0)
    start, step = random.normal(size=(2, 16, 6)), random.normal(size=6)
    assert on_principal_axes(start, start + step)["common_displacement"] == pytest.approx([1.0, 1.0])
    moves = random.normal(size=(2, 16, 6))
    apart = moves - moves.mean(axis=1, keepdims=True)
    assert on_principal_axes(start, start + apart)["common_displacement"] == pytest.approx([0.0, 0.0], abs=1e-12)
    both = apart + step
    expected = (step**2).sum() / ((apart**2).sum(axis=2).mean(axis=1) + (step**2).sum())
    assert on_principal_axes(start, start + both)["common_displacement"] == pytest.approx(expected)
    assert np.isnan(on_principal_axes(start, start)["common_displacement"]).all()


def test_coordinates_are_those_of_a_principal_component_analysis() -> None:
    """Their covariance is diagonal with the largest eigenvalues of all channels; three channels lose nothing."""
    random = np.random.default_rng(1)
    start, end = random.normal(size=(1, 20, 7)) * np.arange(1, 8), random.normal(size=(1, 20, 7))
    found = on_principal_axes(start, end)
    placed = found["stream_position"][:, 0].reshape(40, 3)
    values = np.linalg.eigvalsh(np.cov(np.concatenate([start[0], end[0]]).T, bias=True))[::-1]
    np.testing.assert_allclose(placed.T @ placed / 40, np.diag(values[:3]), atol=1e-9)
    np.testing.assert_allclose(found["explained"][0], values[:3] / values.sum())
    whole = on_principal_axes(start[..., :3], end[..., :3])["stream_position"][:, 0]
    for a, b in ((start, start), (start, end)):
        distance = np.linalg.norm(a[0, 3, :3] - b[0, 9, :3])
        assert np.linalg.norm(whole[0, 3] - whole[0 if b is start else 1, 9]) == pytest.approx(distance)


def test_the_stream_is_read_before_and_after_the_branch_is_added() -> None:
    subject = attention_net()
    (layer,) = attended_layers(subject, ())
    before, after = tokens_around(subject, layer, 5)
    seen = {}
    block = subject.model.get_submodule("blocks.0")
    norm, attention = block.get_submodule("norm1"), block.get_submodule("attention")
    handles = [
        norm.register_forward_pre_hook(lambda _, args: seen.update(stream=args[0])),
        attention.register_forward_hook(lambda _, args, output: seen.update(branch=output)),
    ]
    with torch.no_grad():
        subject.model(torch.cat([inputs for inputs, _ in subject.batches])[:5])
    for handle in handles:
        handle.remove()
    stream, branch = (tensor[:, -before.shape[1] :].numpy() for tensor in (seen["stream"], seen["branch"]))
    np.testing.assert_allclose(before, stream, rtol=1e-12)
    np.testing.assert_allclose(after - before, branch, atol=1e-12)


@pytest.mark.slow
def test_it_is_stored_drawn_and_another_measurement_than_t_sne(tmp_path: Path) -> None:
    subject = attention_net()
    data = landscape.measure("tokens", subject, out=tmp_path / "r.h5", quiet=True, images=5, method="principal")
    assert data["stream_position"].dims == ("layer", "side", "image", "token", "axis")
    row = data["common_displacement"].values[0]
    assert float(data["common"][0]) == pytest.approx(row.mean())
    assert float(data["common_se"][0]) == pytest.approx(row.std(ddof=1) / 5**0.5)
    (number,) = measured(reader.find(tmp_path / "r.h5", "tokens")[0][1])
    assert (number.value, number.error) == (float(data["common"][-1]), float(data["common_se"][-1]))
    assert [path.name for path in drawing.draw(tmp_path / "r.h5", tmp_path / "figures")] == ["tokens_moved.png"]
    digests = {digest(probe, subject) for probe in (PRINCIPAL, Tokens(images=5, perplexity=2.0))}
    assert len(digests) == 2

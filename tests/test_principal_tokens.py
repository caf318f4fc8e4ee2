"""Tokens around self-attention: their principal coordinates, what moves together, and which tensors are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from analytic import attention_net, convolution_net, run_probe

import landscape
from landscape.layers.principal_tokens import attended_layers, on_principal_axes, tokens_around
from landscape.options import OptionError
from landscape.plots import drawing
from landscape.plots.measured import measured
from landscape.probe import NotApplicable
from landscape.probes.tokens import Tokens
from landscape.results import reader
from landscape.run import run_key

PROBE = Tokens(images=5, method="principal", depths="0,1")


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
    digests = {run_key(probe, subject, "").digest for probe in (PROBE, Tokens(images=5, perplexity=2.0))}
    assert len(digests) == 2
    assert "method" not in Tokens(images=5).identity(subject)


def test_networks_without_attention_are_left_out_and_other_methods_refused() -> None:
    with pytest.raises(NotApplicable, match="--method principal needs layers of self-attention"):
        run_probe(PROBE, convolution_net())
    with pytest.raises(OptionError, match="--method must be tsne or principal, got umap"):
        Tokens(method="umap")  # type: ignore[arg-type]

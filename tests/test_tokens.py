"""t-SNE of tokens: groups stay together, coordinates follow from the seed, and bad questions are explained."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
import torch
from analytic import attention_net, passage, run_probe

from landscape.options import OptionError
from landscape.probes.tokens import Tokens

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")


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


def test_layers_are_those_nearest_to_the_depths() -> None:
    subject = attention_net()
    plan = Tokens(images=6, perplexity=2.0, depths="0,0.6").plan(subject)
    assert plan.labels["name"][1].tolist() == ["patch_embedding", "blocks.0.attention"]
    assert ", 6 samples, " in str(plan.facts["protocol"])  # those that are drawn, of 12
    assert len(Tokens(images=6, perplexity=2.0, layers=("blocks.0",)).plan(subject).over["layer"]) > 1


def test_bad_questions_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"4 images have 16 tokens at .*, t-SNE needs more than its perplexity of 20"):
        Tokens(images=4).plan(attention_net())
    with pytest.raises(OptionError, match="--depths must be numbers from 0 to 1, got 2"):
        Tokens(depths="2")
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(ValueError, match=r"tokens needs scikit-learn .* pip install 'landscape-probes\[tsne\]'"):
        Tokens(images=6, perplexity=2.0).plan(attention_net())

"""Pictures of attention: the rows of the maps that the network computes, mean over heads, without prefix."""

import numpy as np
import pytest
import torch
import xarray as xr
from analytic import attention_net, convolution_net, run_probe

from landscape import models
from landscape.plots.appearance import look_of
from landscape.plots.figures import attention_maps as figures
from landscape.probes.attention_maps import AttentionPictures
from landscape.subject.subject import Subject


def test_the_maps_are_the_rows_of_softmax_over_the_patches() -> None:
    subject = attention_net(sizes=(3, 2))
    found = run_probe(AttentionPictures(images=5, queries="0.9,0.1,0,0.99"), subject)
    images = torch.cat([batch[0] for batch in subject.batches])
    kept: list[torch.Tensor] = []
    attention = subject.model.get_submodule("blocks.0.attention")
    attention.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    with torch.no_grad():
        subject.model(images)
        query, key, _ = attention.get_submodule("qkv")(kept[0]).view(5, 5, 3, 2, 3).permute(2, 0, 3, 1, 4)
        maps = (query @ key.transpose(-1, -2) / 3**0.5).softmax(dim=-1)[..., 1:, 1:]
    maps = (maps / maps.sum(dim=-1, keepdim=True)).mean(dim=1).numpy()  # (image, query, key) of 2 x 2 patches
    np.testing.assert_allclose(found["attention"][:, 0, 0].reshape(5, 4), maps[:, 2], rtol=1e-9)
    np.testing.assert_allclose(found["attention"][:, 0, 1].reshape(5, 4), maps[:, 1], rtol=1e-9)
    assert found["picture"].shape == (5, 3, 4, 4)
    few = AttentionPictures(images=2).plan(subject)
    assert ", 2 samples, " in str(few.facts["protocol"])  # those that are drawn, of 5
    assert (found["picture"].min(), found["picture"].max()) == (0.0, 1.0)


def test_self_attention_within_windows_has_no_picture() -> None:
    torch.manual_seed(0)
    model = models.build("alternet_demo", classes=3, image_size=32).eval()
    subject = Subject(model, [(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))])
    with pytest.raises(ValueError, match=r"none of the \d self-attentions covers the whole image"):
        run_probe(AttentionPictures(images=1), subject)
    with pytest.raises(ValueError, match="no self-attention was found"):
        run_probe(AttentionPictures(images=1), convolution_net())


def test_more_pictures_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="13 pictures were asked for, the data have 12 samples"):
        AttentionPictures(images=13).plan(attention_net())


def test_networks_with_few_layers_get_pictures_as_large_as_those_of_networks_with_many() -> None:
    def result(depth: int) -> xr.Dataset:
        return xr.Dataset(
            {
                "attention": (("image", "layer", "query", "row", "column"), np.ones((1, depth, 1, 4, 4))),
                "picture": (("image", "channel", "pixel_row", "pixel_column"), np.zeros((1, 3, 8, 8))),
                "place": (("query", "coordinate"), np.array([[0.5, 0.5]])),
                "depth": ("layer", np.linspace(0, 1, depth)),
                "done": ("image", np.ones(1)),
            },
            attrs={"label": f"of {depth} layers", "protocol": "test"},
        )

    results = [result(6), result(1)]
    figure = figures.page(results, [look_of(data) for data in results])
    figure.draw_without_rendering()
    many, few = (ax.get_window_extent().width / np.ptp(ax.get_xlim()) for ax in figure.axes)
    assert few == pytest.approx(many)

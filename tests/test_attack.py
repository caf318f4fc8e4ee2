"""FGSM and PGD against their definition, another library, a linear network's closed form; bad input."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from analytic import batches_of, convolution_net, run_probe
from matplotlib.figure import Figure
from torch import Tensor, nn

import landscape
from landscape.data.dataset import Batches, Images
from landscape.plots import appearance
from landscape.plots.appearance import look_of
from landscape.plots.figures import attack as figure
from landscape.probes.attack import Attack
from landscape.statistics.intervals import quantile
from landscape.statistics.paired import mean_difference
from landscape.subject.losses import cross_entropy
from landscape.subject.mc_dropout import with_members
from landscape.subject.pixels import fgsm, pgd
from landscape.subject.subject import Subject

EPS = 3 / 255


def pictures(count: int = 9, side: int = 6, **normal: Any) -> Images:
    random = torch.Generator().manual_seed(3)
    inputs = torch.randint(256, (count, 3, side, side), generator=random, dtype=torch.uint8)
    normal = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3), **normal}
    return Images(inputs, torch.arange(count) % 3, "pictures", 3, side, **normal)


def on_pictures(model: nn.Module | None = None, *, batch_size: int = 4, **normal: Any) -> Subject:
    model = convolution_net().model.float() if model is None else model
    return Subject(model, Batches(pictures(**normal), batch_size))


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 3)).eval()


def test_fgsm_of_a_linear_network_moves_every_pixel_by_eps_in_the_known_direction() -> None:
    subject = on_pictures(linear())
    found = run_probe(Attack(methods="fgsm", eps="0,3/255"), subject)
    images, std = pictures(), torch.tensor((0.2, 0.25, 0.3)).view(3, 1, 1)
    pixels, weight = images.inputs / 255, subject.model[1].weight  # type: ignore[index]
    inputs = images.normalised(images.inputs)
    p = subject.model(inputs).softmax(dim=1) - nn.functional.one_hot(images.targets, 3)
    direction = (p @ weight).view_as(pixels) / std  # the closed form of the gradient by the pixels
    moved = (pixels + EPS * direction.sign()).clamp(0, 1)
    logits = subject.model((moved - torch.tensor((0.4, 0.5, 0.6)).view(3, 1, 1)) / std)
    assert found["loss"][0, 1] == pytest.approx(cross_entropy(logits, images.targets).mean().item(), rel=1e-5)
    assert found["loss"][0, 0] == pytest.approx(found["facts"]["intact_loss"], rel=1e-6)
    assert found["accuracy"][0, 0] == found["facts"]["intact_accuracy"]
    assert found["loss_increase"][0, 1] > 0


def test_attacks_stay_in_the_ball_and_in_the_range_of_pixels() -> None:
    seen: list[Tensor] = []

    def losses(pixels: Tensor) -> Tensor:
        seen.append(pixels.detach())
        return (pixels * weights).sum(dim=(1, 2, 3)).square()

    weights = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    pixels = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    start = (pixels + 0.1 * torch.ones_like(pixels)).clamp(0, 1)
    for changed in (fgsm(losses, pixels, 0.1), pgd(losses, pixels, 0.1, step=0.07, steps=5, start=start), *seen):
        assert (changed - pixels).abs().max() <= 0.1 + 1e-6
        assert changed.min() >= 0
        assert changed.max() <= 1


def test_another_library_finds_the_same_images() -> None:
    torchattacks = pytest.importorskip("torchattacks")
    subject = on_pictures()
    images, model = pictures(), subject.model
    pixels = images.inputs / 255

    class OfPixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            mean, std = (torch.tensor(v).view(3, 1, 1) for v in (images.mean, images.std))
            return self.model((x - mean) / std)  # type: ignore[no-any-return]

    whole = OfPixels().eval()

    def losses(x: Tensor) -> Tensor:
        return cross_entropy(whole(x), images.targets)

    theirs = torchattacks.FGSM(whole, eps=EPS)(pixels, images.targets)
    assert torch.equal(fgsm(losses, pixels, EPS), theirs)
    attack = torchattacks.PGD(whole, eps=EPS, alpha=EPS / 4, steps=7, random_start=False)
    theirs = attack(pixels, images.targets)
    ours = pgd(losses, pixels, EPS, step=EPS / 4, steps=7, start=pixels)
    assert torch.equal(ours, theirs)
    probe = Attack(methods="pgd", eps="3/255", steps=7, step_size=str(EPS / 4), random_start=False)
    expected = cross_entropy(whole(theirs), images.targets)
    assert run_probe(probe, subject)["loss"][0, 0] == pytest.approx(expected.mean().item(), rel=1e-5)


@pytest.mark.slow
def test_pgd_is_at_least_as_strong_and_restarts_only_lower_the_accuracy() -> None:
    subject = on_pictures()
    found = run_probe(Attack(eps="2/255,8/255", steps=20), subject)
    assert (found["loss"][1] >= found["loss"][0] - 1e-3).all()
    assert (found["loss"][1] > found["facts"]["intact_loss"]).all()
    more = run_probe(Attack(methods="pgd", eps="2/255,8/255", steps=20, restarts=3), subject)
    assert (more["loss"][0] >= found["loss"][1] - 1e-9).all()
    assert (more["accuracy"][0] <= found["accuracy"][1]).all()


def test_random_starts_belong_to_the_sample_not_to_the_batch_and_errors_are_those_of_samples() -> None:
    probe = Attack(methods="pgd", eps="8/255", steps=1)
    first, second, each = (run_probe(probe, on_pictures(batch_size=size)) for size in (4, 9, 1))
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-6)
    losses = each["loss_sum"][:, 0, 0]
    assert first["loss_se"][0, 0] == pytest.approx(losses.std(ddof=1) / np.sqrt(len(losses)), rel=1e-5)
    assert run_probe(replace(probe, seed=1), on_pictures())["loss"] != pytest.approx(first["loss"], rel=1e-6)


def test_gradients_pass_through_the_mean_of_the_members() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3)).eval()
    subject = with_members(on_pictures(model, batch_size=9), 4)
    found = run_probe(Attack(methods="fgsm", eps="4/255"), subject)
    inputs, targets = subject.batch(0)
    images, members = pictures(), []
    pixels = (images.inputs / 255).requires_grad_()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (images.mean, images.std))
    for i in range(4):
        with subject.member(i):
            members.append(subject.outputs(inputs._replace(inputs=(pixels - mean) / std)).softmax(dim=1))  # type: ignore[union-attr]
    loss = -torch.stack(members).mean(dim=0).log()[torch.arange(9), targets].sum()  # type: ignore[index]
    (direction,) = torch.autograd.grad(loss, pixels)
    moved = (pixels + 4 / 255 * direction.sign()).clamp(0, 1).detach()
    after = subject.outputs(inputs._replace(inputs=(moved - mean) / std))  # type: ignore[union-attr]
    assert found["loss"][0, 0] == pytest.approx(cross_entropy(after, targets).mean().item(), rel=1e-5)  # type: ignore[arg-type]


def of_model(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def test_inputs_that_are_no_pixels_are_refused() -> None:
    model = convolution_net().model
    with pytest.raises(ValueError, match=r"needs pixels in \[0, 1\], got inputs from -"):
        run_probe(Attack(), Subject(model, batches_of((3, 6, 6), (4,), 3)))
    small = [(torch.rand(4, 3, 6, 6, dtype=torch.float64), torch.arange(4) % 3)]
    assert run_probe(Attack(methods="fgsm", eps="2/255"), Subject(model, small))["loss"].shape == (1, 1)
    with pytest.raises(ValueError, match=r"needs images \(N, C, H, W\), got \(4, 4\)"):
        run_probe(Attack(), Subject(nn.Linear(4, 3), [(torch.rand(4, 4), torch.arange(4) % 3)]))
    loaded = landscape.load(linear(), data=(torch.rand(6, 3, 6, 6), torch.arange(6) % 3), loss=of_model)
    with pytest.raises(ValueError, match="needs a loss per sample"):
        run_probe(Attack(), loaded)


def attacked(seed: int, batch_size: int, **options: Any) -> xr.Dataset:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 3)).eval()
    subject = on_pictures(model, batch_size=batch_size)
    options = {"eps": "1/255,8/255", "methods": "fgsm", **options}
    return landscape.measure("attack", subject, out=None, label=f"net {seed}", quiet=True, **options)


@pytest.mark.slow
def test_networks_on_the_same_samples_are_compared_sample_by_sample() -> None:
    results = [attacked(1, 4), attacked(2, 3), attacked(3, 4, eps="8/255")]  # mini-batches of other sizes
    assert figure.alike(results) == [0, 1, 2]
    eps = results[0]["eps"].values
    rows = [figure.samples_of(data, "fgsm", eps, "accuracy") for data in results[:2]]
    assert rows[0].shape == (2, 9)
    np.testing.assert_allclose(rows[1].mean(axis=1), results[1]["accuracy"][0])
    mean, (low, high) = mean_difference(rows[1], rows[0], shares=True)
    np.testing.assert_allclose(mean, (results[1]["accuracy"] - results[0]["accuracy"])[0])
    assert ((low <= mean) & (mean <= high) & (low >= -1) & (high <= 1)).all()
    assert [*figure.paired(results[2], results[0])] == ["FGSM at 8/255"]
    page = figure.page(results, appearance.looks(results))
    below = page.axes[1]
    assert below.get_ylabel() == "difference in accuracy"
    assert below.lines[0].get_ydata().tolist() == mean.tolist()
    assert len(below.lines[2].get_xdata()) == 1  # the third network shares one eps


def test_other_samples_are_not_compared() -> None:
    one = attacked(1, 4)
    assert figure.alike([one, one.assign_attrs(data_sha256="other")]) == []
    assert figure.alike([one.drop_vars("sample_accuracy"), one]) == []


def test_bands_stay_in_the_range_of_an_accuracy_and_begin_with_that_of_the_clean_images() -> None:
    data = attacked(1, 4)
    data = data.assign(accuracy=data["accuracy"] * 0 + 1.0, accuracy_se=data["accuracy_se"] * 0)
    data.attrs["intact_accuracy"] = 1.0
    ax = figure.draw(data, Figure().subplots(), look=look_of(data))
    heights = ax.collections[0].get_paths()[0].vertices
    assert heights[:, 1].max() == 1.0
    at_zero = heights[heights[:, 0] == 0.0, 1]
    assert at_zero.min() == pytest.approx(9 / (9 + quantile(9) ** 2))  # Wilson's, of nine images without an error

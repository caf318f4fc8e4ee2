"""Frozen dropout masks, and the mean prediction of the networks that they make."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from analytic import batches_of, rebatched, run_probe
from devices import KINDS, SIZES, machine, subject_on
from torch import Tensor, nn

import landscape
from landscape.models.dropout_masks import FrozenMasks, frozen_masks, kept
from landscape.options import OptionError
from landscape.predictions.evaluation import metrics_of
from landscape.probe import derived_seed
from landscape.probes import PROBES, probe_class
from landscape.probes.fourier import Fourier
from landscape.probes.line import Line
from landscape.probes.similarity import Similarity
from landscape.probes.variance import Variance
from landscape.products.hvp_backends import curvature
from landscape.running.run import run_key
from landscape.statistics.means import error_over_members, means_over_batches
from landscape.subject.loading.load import load_spec
from landscape.subject.mc_dropout import as_is, calls_of, with_members
from landscape.subject.sample_statistics import per_sample
from landscape.subject.subject import Subject


class Net(nn.Module):
    """Dropout of every kind: modules, channels, alpha, functions that are always on, and functions of the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.channels = nn.Conv2d(2, 4, 3, padding=1), nn.Dropout2d(0.3)
        self.mixed = nn.Conv2d(4, 4, 3, padding=1)
        self.alpha, self.fc, self.last = nn.AlphaDropout(0.2), nn.Linear(4 * 16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.mixed(self.channels(self.conv(x)).tanh()), 0.1)
        x = F.dropout(self.alpha(self.fc(x.flatten(1))), 0.4, self.training, inplace=True)
        return self.last(x.sin())


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return batches_of((2, 4, 4), sizes or (6, 4), 3)


def stochastic(members: int = 4, model: nn.Module | None = None, **changes: Any) -> Subject:
    torch.manual_seed(0)
    model = (model or Net()).double().eval()
    return with_members(Subject(model, changes.pop("batches", batches()), **changes), members)


def of_members(subject: Subject, *members: int) -> list[Tensor]:
    """The outputs of members on the first mini-batch."""
    found = []
    for member in members:
        with subject.member(member):
            found.append(subject.outputs(subject.batch(0)[0]))
    return found


def test_masks_keep_the_wanted_share_of_elements_and_are_independent() -> None:
    mask = kept(17, torch.arange(400), 500, 0.3)
    assert mask.double().mean().item() == pytest.approx(0.7, abs=4 * math.sqrt(0.21 / mask.numel()))
    centred = mask.double() - 0.7
    others = {
        "samples": centred[1:] * centred[:-1], "elements": centred[:, 1:] * centred[:, :-1],
        "calls": centred * (kept(18, torch.arange(400), 500, 0.3).double() - 0.7),
    }  # fmt: skip
    for what, products in others.items():
        assert abs(products.mean().item()) < 4 * 0.21 / math.sqrt(products.numel()), what
    assert torch.equal(kept(17, torch.tensor([399, 3]), 500, 0.3), mask[[399, 3]])
    for rate, share in ((0.0, 1.0), (1.0, 0.0)):
        assert kept(1, torch.arange(50), 200, rate).double().mean().item() == pytest.approx(share, abs=1e-8)


def test_masks_belong_to_the_samples_and_to_nothing_else() -> None:
    subject = stochastic()
    whole = per_sample(subject)[0]
    for sizes in ((10,), (3, 3, 3, 1)):
        other = stochastic(batches=rebatched(batches(), sizes[0]))
        torch.testing.assert_close(per_sample(other)[0], whole, rtol=1e-12, atol=0)
    assert torch.equal(per_sample(subject)[0], whole)
    assert not torch.allclose(per_sample(stochastic(seed=1))[0], whole)


def test_the_loss_is_that_of_the_mean_probabilities() -> None:
    subject = stochastic(members=3)
    inputs, targets = subject.batch(0)
    every = [outputs.softmax(dim=1) for outputs in of_members(subject, 0, 1, 2)]
    assert not torch.allclose(every[0], every[1])
    mean = torch.stack(every).mean(dim=0)
    torch.testing.assert_close(subject.outputs(inputs).exp(), mean)
    torch.testing.assert_close(subject.loss(0), -mean[torch.arange(6), targets].log().mean())
    with pytest.raises(IndexError, match="there is no member 3: the subject has 3"), subject.member(3):
        pass


@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_the_mean_over_many_members_approaches_the_expectation(rate: float) -> None:
    """Of a linear network, E[dropout(x)] = x, with variance x^2 rate / (1 - rate)."""
    model = nn.Sequential(nn.Flatten(), nn.Dropout(rate))
    x = torch.randn(4, 32, dtype=torch.float64)
    total = torch.zeros_like(x)
    for member in range(400):
        with frozen_masks(model, masks := FrozenMasks(member, torch.arange(4))):
            total += model.eval()(x)
    assert masks.calls == [rate]
    error = (total / 400 - x) / (x.abs() * math.sqrt(rate / (1 - rate) / 400))
    assert error.abs().max() < 4.5
    assert error.square().mean().item() == pytest.approx(1, abs=0.4)


class Attending(nn.Module):
    """As in timm: the fused attention gets the dropout rate in training mode only."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.drop = kind, nn.Dropout(0.2)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2)[:, :, :1].expand(-1, -1, 4) * torch.arange(4)
        if self.kind == "module":
            return self.attention(x, x, x, need_weights=False)[0].mean(1)
        if self.kind == "weights":
            return self.attention(x, x, x)[0].mean(1)
        q = x[:, None]
        if self.kind == "fused":
            p = self.drop.p if self.training else 0.0
            return F.scaled_dot_product_attention(q, q, q, dropout_p=p)[:, 0].mean(1)
        return (self.drop((q @ q.transpose(-2, -1) / 2).softmax(-1)) @ q)[:, 0].mean(1)


@pytest.mark.parametrize("kind", ["module", "weights", "fused", "explicit"])
def test_dropout_inside_attention_is_on(kind: str) -> None:
    subject = stochastic(2, Attending(kind))
    values = of_members(subject, 0, 1, 0)
    assert torch.equal(values[0], values[2])
    assert not torch.allclose(values[0], values[1])
    plain = as_is(subject)
    assert not plain.members
    assert not torch.allclose(plain.outputs(plain.batch(0)[0]), values[0])


@pytest.mark.slow
def test_fused_and_explicit_attention_drop_the_same_weights() -> None:
    torch.testing.assert_close(*(of_members(stochastic(1, Attending(kind)), 0) for kind in ("fused", "explicit")))


@pytest.mark.parametrize("name", ["vit_demo", "resnet_demo", "preresnet_demo", "alternet_demo"])
def test_stochastic_depth_of_the_bundled_networks_is_sampled_per_sample(name: str) -> None:
    torch.manual_seed(0)
    model = landscape.models.build(name, classes=3, image_size=8, drop_path=0.5).eval()
    x = torch.randn(1, 3, 8, 8).expand(16, -1, -1, -1)
    with frozen_masks(model, masks := FrozenMasks(0, torch.arange(16))), torch.no_grad():
        outputs = model(x)
    assert max(masks.calls) == 0.5
    assert len({tuple(row.tolist()) for row in outputs}) > 4
    with torch.no_grad():
        assert torch.allclose(model(x)[0], model(x)[1], atol=1e-5)  # off again


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
def test_masks_are_the_same_in_forward_mode_and_in_derivatives() -> None:
    """v'Hv by forward over reverse equals double backward, and the double-precision pass of --kinks has the masks."""
    subject = stochastic(2)
    parameters = subject.parameters
    v = {name: torch.randn_like(p) for name, p in parameters.items()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        (inputs, positions), targets = subject.batch(0)
        model = lambda x: torch.func.functional_call(subject.model, weights, (x,))  # noqa: E731
        return subject.losses(subject.forward(model, type(subject.batch(0)[0])(inputs, positions)), targets).mean()

    weights = {name: p.detach() for name, p in parameters.items()}
    _, tangent = torch.func.jvp(torch.func.grad(loss), (weights,), (v,))
    product = curvature(subject, parameters, "double-backward").product(0)(
        torch.cat([t.reshape(-1) for t in v.values()])
    )
    torch.testing.assert_close(torch.cat([t.reshape(-1) for t in tangent.values()]), product)


@pytest.mark.slow
def test_a_frozen_line_is_a_function_as_smooth_as_without_dropout() -> None:
    subject = stochastic(4)
    line = Line(resolution=41)
    with_masks, without = (np.asarray(run_probe(line, one)["loss"]) for one in (subject, stochastic(0, NoDropout())))
    assert np.abs(np.diff(with_masks.squeeze())).max() <= 2 * np.abs(np.diff(without.squeeze())).max()


class NoDropout(Net):
    """The same network without any dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fc(self.mixed(self.conv(x).tanh()).flatten(1)).sin())


class DropBlock2d(nn.Module):
    """As torchvision and timm have it: their names for the rate differ."""

    __module__ = "torchvision.ops.drop_block"

    def __init__(self, name: str, rate: float) -> None:
        super().__init__()
        setattr(self, name, rate)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)


def scripted(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        part: nn.Module = torch.jit.script(module)
    return part


class Parts(nn.Sequential):
    """A part between two layers, and dropout that can be frozen."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__(nn.Conv2d(2, 4, 3), part, nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.fc = nn.Dropout(0.5), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.drop(x.flatten()[: 3 * len(x) - 1, None])  # rows of packed sequences
        return self.fc(x.flatten(1))


REFUSED = {
    r"the model \(NoDropout\) has no dropout with a rate above 0.*drop --mc-dropout": NoDropout,
    r"^1 is a DropBlock2d, which scales its blocks by the whole mini-batch.*--mc-dropout$":
        lambda: Parts(DropBlock2d("p", 0.1)),
    "^1 is a DropBlock2d": lambda: Parts(DropBlock2d("drop_prob", 0.1)),
    r"^1 is TorchScript and holds dropout, which stays off there.*--mc-dropout$": lambda: Parts(scripted(Scripted())),
    r"^1\.0 is TorchScript": lambda: Parts(nn.Sequential(scripted(Scripted()))),
    r"^dropout of drop acts on \(17, 1\), expected rows for the 6 samples": Packed,
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_dropout_that_there_is_not_or_that_cannot_be_frozen_is_refused_by_name(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        per_sample(stochastic(2, REFUSED[said]()))


def test_members_of_other_numbers_and_losses_and_parts_of_a_script_are_refused() -> None:
    with pytest.raises(ValueError, match="--mc-dropout must be at least 0, got -1"):
        landscape.load(NoDropout(), data=batches(), mc_dropout=-1)
    with pytest.raises(ValueError, match=r"--mc-dropout averages predicted probabilities.*--loss cross-entropy"):
        landscape.load(Net(), data=batches(), loss=lambda outputs, targets: outputs.square().mean(1), mc_dropout=2)
    with pytest.raises(ValueError, match=r"modules of a TorchScript program \(1\) cannot be hooked; save the state"):
        Variance().plan(Subject(Parts(scripted(nn.Softplus())).double().eval(), batches()))


class DropBlock(nn.Sequential):
    """A block of a network's own, of which only the name is a library's."""

    drop_prob = 0.1


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class ScaledDropPath(Doubled):
    drop_prob = 0.5


@pytest.mark.parametrize(("part", "plain"), [(DropBlock(nn.ReLU()), nn.ReLU()), (ScaledDropPath(), Doubled())])
def test_blocks_that_are_merely_called_like_dropout_stay_as_they_are(part: nn.Module, plain: nn.Module) -> None:
    found, wanted = (stochastic(2, Parts(one), batches=batches(5)) for one in (part, plain))
    wanted.model.load_state_dict(found.model.state_dict())
    torch.testing.assert_close(per_sample(found), per_sample(wanted), rtol=0.0, atol=0.0)


AS_IN_EVALUATION: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = [
    (nn.RReLU(), lambda x: torch.where(x > 0, x, x * (1 / 8 + 1 / 3) / 2)),
    (DropBlock2d("p", 0.0), lambda x: x),
    (scripted(nn.Softplus()), F.softplus),
]


@pytest.mark.parametrize(("part", "written"), AS_IN_EVALUATION)
def test_parts_that_draw_nothing_in_evaluation_stay_as_they_are_beside_frozen_masks(
    part: nn.Module, written: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """Written out: the part as in evaluation (RReLU with its mean slope), then one mask per member and sample."""
    caplog.set_level("INFO")
    subject = stochastic(3, Parts(part), batches=batches(5))
    conv, _, _, _, last = subject.model
    (x, targets), whole = subject.batches[0], []
    for member in range(3):
        features = written(conv(x))
        masks = FrozenMasks(derived_seed(0, "dropout", member), torch.arange(5))
        keep = kept(derived_seed(masks._seed, 0), torch.arange(5), 16, 0.5)
        whole.append(last(features.flatten(1) * keep * 2).softmax(dim=1))
    expected = F.nll_loss(torch.stack(whole).mean(dim=0).log(), targets, reduction="none")
    torch.testing.assert_close(per_sample(subject)[0], expected, rtol=1e-9, atol=0.0, check_dtype=False)
    notes = [line for line in caplog.messages if "RReLU" in line]
    only_masks = "note: 1 (RReLU) keep their mean slope; --mc-dropout draws dropout masks only"
    assert notes == ([only_masks] if isinstance(part, nn.RReLU) else [])


def test_members_belong_to_the_result() -> None:
    keys = [run_key(Line(resolution=3), stochastic(n, NoDropout() if not n else None), "")[0] for n in (0, 2, 3)]
    assert len({key.digest for key in keys}) == 3
    assert "mean of 2 dropout masks" in keys[1].attributes["protocol"]
    again, _ = run_key(Line(resolution=3), replace(stochastic(2), seed=0), "")
    assert again.digest == keys[1].digest


def test_statistics_of_feature_maps_are_means_over_the_members() -> None:
    subject = stochastic(3)
    maps: list[Tensor] = []
    with subject.model.mixed.register_forward_hook(lambda module, args, output: maps.append(output)):
        for i in range(3):
            with subject.member(i), torch.no_grad():
                for inputs, _ in subject.each_batch():
                    subject.outputs(inputs)
    every = torch.cat(maps).detach().view(3, 10, 4, 16)
    variances = every.var(dim=3).mean(dim=2)
    found = run_probe(Variance(layers=("mixed",)), subject)
    np.testing.assert_allclose(found["variance"], [variances.mean()])
    means = variances.mean(dim=1)
    np.testing.assert_allclose(found["variance_member_se"], [means.std() / 3**0.5])
    assert found["variance_se"].item() >= variances.mean(dim=0).std().item() / 10**0.5
    amplitude = (torch.fft.fft2(every.view(3, 10, 4, 4, 4)).abs() + 1e-6).log().mean(dim=(0, 1, 2))
    fourier = run_probe(Fourier(layers=("mixed",)), subject)
    np.testing.assert_allclose(fourier["delta_log_amplitude"], [amplitude.diagonal()[:2] - amplitude[0, 0]], rtol=1e-6)
    assert fourier["high_frequency_member_se"] > 0


def test_a_part_of_the_members_gives_their_mean() -> None:
    data = {
        "done": np.array([[1, 1], [1, 0]]), "samples": np.array([[2.0, 2.0], [2.0, np.nan]]),
        "value_sum": np.array([[2.0, 4.0], [8.0, np.nan]]), "value_square_sum": np.array([[4.0, 8.0], [32.0, np.nan]]),
    }  # fmt: skip
    mean = means_over_batches(data, ("value",))["value"]
    assert mean == (3 + 8) / 4
    assert error_over_members(data, "value_sum") == pytest.approx(np.std([1, 2], ddof=1) / 2**0.5)


def test_cka_of_members_compares_every_member_with_itself() -> None:
    found = run_probe(Similarity(layers=("conv", "mixed")), stochastic(2))
    np.testing.assert_allclose(np.diag(found["cka"]), 1.0)
    assert found["hsic"].shape[:2] == (2, 2)


class Noisy(nn.Module):
    """Draws noise in evaluation mode, by dropout or otherwise."""

    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self.conv, self.fc, self.dropout = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(64, 3), dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.fc((F.dropout(x, 0.3) if self.dropout else x + torch.randn_like(x)).flatten(1))


@pytest.mark.parametrize("dropout", [True, False])
def test_every_probe_refuses_a_network_that_draws_random_numbers(dropout: bool) -> None:
    subject = Subject(Noisy(dropout).double().eval(), batches())
    for name in PROBES:
        if name != "trajectory":
            with pytest.raises(ValueError, match="draws random numbers in evaluation mode") as caught:
                run_key(probe_class(name)(**probe_class(name).smallest), subject, "")
            assert ("freeze its dropout masks (--mc-dropout 10)" in str(caught.value)) is dropout, name


def test_evaluate_refuses_one_pass_of_such_a_network() -> None:
    x, y = torch.randn(12, 2, 4, 4), torch.arange(12) % 3
    subject = landscape.load(Noisy(True), data=(x, y))
    with pytest.raises(ValueError, match=r"--mc-dropout 10.*or average several passes \(--passes 10\)"):
        metrics_of(subject)
    frozen = landscape.load(Noisy(True), data=(x, y), mc_dropout=3)
    assert metrics_of(frozen) == metrics_of(frozen)
    assert metrics_of(frozen)["loss"] == pytest.approx(per_sample(frozen)[0].mean().item())
    with pytest.raises(OptionError, match="--passes 2 and --mc-dropout 3 both average"):
        metrics_of(frozen, passes=2)


class Folded(nn.Module):
    """Dropout on windows, (N * windows, heads, ...), or on sequences, (tokens, N, ...)."""

    def __init__(self, windows: bool) -> None:
        super().__init__()
        self.windows, self.fc = windows, nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.windows:
            return self.fc(F.dropout(x.reshape(4 * len(x), 2, 4), 0.5).reshape(len(x), -1))
        return self.fc(F.dropout(x.flatten(1).T.reshape(32, len(x)), 0.5).T)


@pytest.mark.parametrize("windows", [True, False])
def test_the_dimension_of_the_samples_does_not_depend_on_their_number(windows: bool) -> None:
    """2 samples could be the heads of a window, and 4 divide the length of a sequence."""
    model = Folded(windows)
    whole = per_sample(stochastic(2, model))[0]
    for size in (1, 2, 4):
        some = stochastic(2, model, batches=rebatched(batches(), size))
        torch.testing.assert_close(per_sample(some)[0], whole, rtol=1e-12, atol=0)


def test_kinks_of_members_are_fixed_by_a_pass_in_double_precision() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(128, 3)
    x, y = torch.randn(8, 2, 4, 4), torch.arange(8) % 3
    model = nn.Sequential(*layers).eval()
    products = []
    for dtype in (torch.float32, torch.float64):
        subject = with_members(Subject(model.to(dtype), [(x.to(dtype), y)]), 3)
        curved = curvature(subject, subject.parameters, "double-backward", kinks="double")
        assert curved.fixed is (dtype == torch.float32)
        products.append(curved.product(0)(torch.ones(curved.size, dtype=dtype)).double())
    torch.testing.assert_close(products[0], products[1], rtol=1e-4, atol=1e-6)


def test_dropout_that_attention_is_told_in_training_mode_only_is_found() -> None:
    """As in timm and transformers; the modules stay in the mode that they were in."""
    subject = stochastic(2, Attending("fused"))
    assert [(call.told, call.rate) for call in calls_of(subject)] == [(0.0, 0.2)]
    assert not any(module.training for module in subject.model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_the_same_on_a_device_without_its_random_numbers(kind: str) -> None:
    sizes = {**SIZES["vit_demo"], "depth": 2, "dropout": 0.2, "drop_path": 0.3}
    options = {"mc_dropout": 3, "model_arg": sizes, "samples": 6}
    expected = per_sample(subject_on("cpu", **options))[0]
    with machine(kind) as simulation:
        found = per_sample(subject_on("cuda", **options))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if simulation is not None:
        assert not simulation.draws


def test_another_process_loads_the_same_members() -> None:
    subject = subject_on("cpu", mc_dropout=2, model_arg={**SIZES["vit_demo"], "dropout": 0.2})
    again = load_spec(subject.spec)
    assert torch.equal(per_sample(again)[0], per_sample(subject)[0])
    plain = load_spec(replace(subject.spec, mc_dropout=0))
    assert not torch.allclose(per_sample(plain)[0], per_sample(subject)[0])


@pytest.mark.parametrize("loss", ["mse", "l1", "huber", "bce"])
def test_predictions_of_other_losses_are_averaged(loss: str) -> None:
    x, y = torch.randn(8, 2, 4, 4), torch.rand(8, 3).round()
    subject = landscape.load(Net(), data=(x, y), loss=loss, mc_dropout=3)
    _, targets = subject.batch(0)
    every = torch.stack(of_members(subject, 0, 1, 2))
    mean = (every.sigmoid() if loss == "bce" else every).mean(dim=0)
    expected = F.binary_cross_entropy(mean, targets) if loss == "bce" else subject.losses(mean, targets).mean()
    torch.testing.assert_close(subject.loss(0), expected)

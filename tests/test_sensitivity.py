"""Perturbed weights against hand-made copies of the network, dense Hessians, torch's quantisation and brute force."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analytic import attention_net, batches_of, convolution_net, dense_hessian, run_probe, same_state, state, tanh_net
from foreign import torchvision_models
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils import prune

from landscape.cli.main import exit_code
from landscape.exchange.bit_tables import BitTable, bit_table
from landscape.layers import partial_forward
from landscape.layers.partial_forward import ResumePoint
from landscape.options import OptionError
from landscape.plots.figures import sensitivity as drawn_sensitivity
from landscape.plots.figures import sensitivity_predictor
from landscape.probe import NotApplicable
from landscape.probes import sensitivity
from landscape.probes.sensitivity import Sensitivity
from landscape.results import reader
from landscape.running.run import run
from landscape.statistics.sensitivity import over_parts, rank_correlation
from landscape.subject.sample_statistics import per_sample
from landscape.subject.subject import Subject
from landscape.weight_space.perturbations import Granularity, pruned, quantised, truncated

MADE = {"tanh": tanh_net, "convolution": convolution_net, "attention": attention_net}


def weights(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def evaluated(subject: Subject, changes: dict[str, Callable[[Tensor], Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    """Loss and correctness per sample of a copy of the network with changed weights."""
    changed = copy.deepcopy(subject.model)
    with torch.no_grad():
        for name, change in changes.items():
            p = changed.get_parameter(name)
            p.copy_(change(p))
    loss, right = per_sample(Subject(changed, subject.batches, losses=subject.losses, forward=subject.forward))
    return loss.numpy(), right.numpy()


# --- perturbations ---


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
def test_quantisation_is_that_of_torch(bits: int, granularity: Granularity) -> None:
    rows, most = weights(6, 32), 2 ** (bits - 1) - 1
    found = quantised(rows, bits, granularity, 8)
    if granularity == "tensor":
        expected = torch.fake_quantize_per_tensor_affine(rows, float(rows.abs().max() / most), 0, -most, most)
    else:
        grouped = rows.reshape(-1, 8) if granularity == "group" else rows
        scale = grouped.abs().amax(dim=1) / most
        zero = torch.zeros(len(scale), dtype=torch.int32)
        expected = torch.fake_quantize_per_channel_affine(grouped, scale, zero, 0, -most, most).reshape(6, 32)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert len(found.flatten().unique()) > bits


def test_a_last_group_may_be_short_and_zeros_stay_zeros() -> None:
    rows = weights(3, 10)
    rows[1] = 0.0
    found = quantised(rows, 4, "group", 4)
    torch.testing.assert_close(found[:, 8:], quantised(rows[:, 8:], 4, "channel", 4))
    assert (found[1] == 0).all()
    assert quantised(torch.zeros(2, 3), 4, "tensor", 4).abs().max() == 0


def test_pruning_is_that_of_torch_and_truncation_is_the_closest_of_its_rank() -> None:
    layer = nn.Linear(12, 7)
    expected = prune.l1_unstructured(copy.deepcopy(layer), "weight", amount=0.4).weight
    torch.testing.assert_close(pruned(layer.weight.detach(), 0.4), expected.detach())
    found, values = truncated(layer.weight.detach(), 0.5), torch.linalg.svdvals(layer.weight.detach())
    assert torch.linalg.matrix_rank(found) == 4
    torch.testing.assert_close((found - layer.weight).norm().detach(), values[4:].norm())


# --- the probe ---


@pytest.mark.parametrize("network", MADE)
def test_changes_are_those_of_a_copy_of_the_network_with_changed_weights(network: str) -> None:
    subject = MADE[network]()
    kept = state(subject.model)
    found = run_probe(Sensitivity(bits="3,2", sparsity="0.5", vectors=0), subject)
    assert same_state(subject.model, kept)
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda p: quantised(p.flatten(1), 3, "channel", 64).reshape(p.shape),
        lambda p: quantised(p.flatten(1), 2, "channel", 64).reshape(p.shape),
        lambda p: pruned(p, 0.5),
    ]
    loss, right = evaluated(subject, {})
    names = [name.split() for name in found["weights"]]
    for s, change in enumerate(changes):
        for i, own in enumerate(names):
            after, still = evaluated(subject, dict.fromkeys(own, change))
            for name, difference in (("loss_increase", after - loss), ("accuracy_drop", right - still)):
                assert found[name][i, s] == pytest.approx(difference.mean(), abs=1e-12)
                assert found[f"{name}_se"][i, s] == pytest.approx(difference.std(ddof=1) / len(loss) ** 0.5, abs=1e-12)
        after, _ = evaluated(subject, dict.fromkeys(itertools.chain(*names), change))
        assert found["together_loss_increase"][s] == pytest.approx((after - loss).mean(), abs=1e-12)
        single = found["loss_increase"][:, s].sum()
        assert found["sum_loss_increase"][s] == pytest.approx(single, abs=1e-12)
        assert found["additivity_error"][s] == pytest.approx((after - loss).mean() - single, abs=1e-12)
    assert np.isnan(found["predictor"]).all()


def test_noise_has_the_asked_norm_in_every_filter_and_grows_along_one_direction() -> None:
    subject = tanh_net()
    found = run_probe(Sensitivity(bits="", noise="0.1,0.2", rank="0.9", vectors=0), subject)
    squares = [subject.model.get_parameter(name).square().sum().item() for name in found["weights"]]
    np.testing.assert_allclose(found["squared_change"][:, 0], 0.01 * np.array(squares), rtol=1e-9)
    np.testing.assert_allclose(found["squared_change"][:, 1], 0.04 * np.array(squares), rtol=1e-9)
    assert found["setting_name"].tolist() == ["noise 0.1", "noise 0.2", "rank 0.9"]


@pytest.mark.slow
@pytest.mark.parametrize("network", ["tanh", "attention"])
def test_the_predictor_is_the_trace_of_the_dense_block_times_the_squared_change(network: str) -> None:
    subject = MADE[network](sizes=(6, 3))
    found = run_probe(Sensitivity(bits="4", vectors=40), replace(subject, weight_decay=0.5))  # no part of the loss
    dense = sum(n / 9 * dense_hessian(subject, i).diagonal() for i, n in enumerate((6, 3)))
    assert isinstance(dense, Tensor)
    ends = np.cumsum([p.numel() for p in subject.parameters.values()])
    blocks = dict(zip(subject.parameters, np.split(dense.numpy(), ends[:-1]), strict=True))
    for i, name in enumerate(found["weights"]):
        assert found["mean_trace"][i] == pytest.approx(blocks[name].mean(), abs=4.5 * found["mean_trace_se"][i])
        p = subject.parameters[name].detach()
        change = (quantised(p.flatten(1), 4, "channel", 64) - p.flatten(1)).square().sum().item()
        assert found["predictor"][i, 0] == pytest.approx(found["mean_trace"][i] * change)
    assert (found["mean_trace_se"] < 0.5 * np.abs(found["mean_trace"]).max()).all()


def test_one_product_is_shared_by_all_units_and_their_samples_add_up() -> None:
    found = run_probe(Sensitivity(bits="4", vectors=2), tanh_net())
    forms = found["quadratic_form"][:, 1:]
    np.testing.assert_allclose(forms[:, :, 1:].sum(axis=2), forms[:, :, 0])


def test_resuming_in_the_middle_of_the_pass_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, probe = attention_net(), Sensitivity(bits="4,2", vectors=0)
    units = probe._units(subject)
    points = sensitivity.resume_points(subject, units)
    assert [point.operations for point in points] == sorted(point.operations for point in points)
    assert all(point != ResumePoint() for point in points[1:])
    resumed = run_probe(probe, subject)
    monkeypatch.setattr(partial_forward, "MOST_KEPT", 3000)  # some of the cached outputs
    np.testing.assert_array_equal(run_probe(probe, subject)["part_loss_increase"], resumed["part_loss_increase"])
    monkeypatch.setattr(sensitivity, "resume_points", lambda subject, units: [ResumePoint()] * len(units))
    whole = run_probe(probe, subject)
    np.testing.assert_array_equal(resumed["part_loss_increase"], whole["part_loss_increase"])


# --- units ---


class SplitHeads(nn.Module):
    """Attention with separate projections, or a fused one whose rows are (head, query | key | value, channel)."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused, self.heads = fused, 2
        self.stem = nn.Linear(5, 8)
        self.projections = nn.ModuleList([nn.Linear(8, 24)] if fused else [nn.Linear(8, 8) for _ in range(3)])
        self.out = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, t, _ = x.shape
        if self.fused:
            q, k, v = self.projections[0](x).reshape(n, t, self.heads, 3, 4).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = (p(x).reshape(n, t, self.heads, 4).transpose(1, 2) for p in self.projections)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, 8)
        logits: Tensor = self.head(self.norm(x + self.out(y)).mean(1))
        return logits


@pytest.mark.parametrize("fused", [True, False])
def test_heads_have_the_rows_that_change_their_output_alone(fused: bool) -> None:
    torch.manual_seed(0)
    subject = Subject(SplitHeads(fused=fused).double().eval(), batches_of((6, 5), (4,), 3))
    found = run_probe(Sensitivity(unit="head", bits="2", vectors=2), subject)
    rows = [
        ["projections.0.weight[0:12]"] if fused else [f"projections.{i}.weight[0:4]" for i in range(3)],
        ["projections.0.weight[12:24]"] if fused else [f"projections.{i}.weight[4:8]" for i in range(3)],
    ]
    assert [text.split() for text in found["weights"]] == rows
    assert found["size"].tolist() == [96, 96]


def test_heads_of_a_fused_projection_in_thirds_and_none_without_attention() -> None:
    found = Sensitivity(unit="head").plan(attention_net()).labels["weights"][1]
    first = "blocks.0.attention.qkv.weight"
    assert found.tolist() == [f"{first}[0:3][6:9][12:15]", f"{first}[3:6][9:12][15:18]"]
    with pytest.raises(NotApplicable, match="no weight"):
        Sensitivity(unit="head").plan(convolution_net())


def test_blocks_hold_every_weight_once_and_neurons_are_rows_of_one() -> None:
    subject = attention_net()
    sizes = {unit: run_probe(Sensitivity(unit=unit, bits="4", vectors=0, neurons=4), subject) for unit in
             ("layer", "block", "neurons")}  # fmt: skip
    assert len({found["size"].sum() for found in sizes.values()}) == 1
    names = sizes["block"]["name"].tolist()
    assert names == ["patch_embedding", "blocks.0.attention", "blocks.0.mlp", "head"]
    assert sizes["block"]["kind"].tolist()[1:3] == ["msa", "mlp"]
    np.testing.assert_allclose(sizes["block"]["together_loss_increase"], sizes["layer"]["together_loss_increase"])
    assert "patch_embedding.weight[0:4]" in sizes["neurons"]["weights"]
    np.testing.assert_allclose(sizes["neurons"]["together_loss_increase"], sizes["layer"]["together_loss_increase"])


def test_a_weight_that_a_parent_module_reads_and_patterns() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model = nn.Sequential(nn.Linear(5, 8), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(),
                          nn.Linear(48, 3)).double().eval()  # fmt: skip
    subject = Subject(model, batches_of((6, 5), (4,), 3))
    found = run_probe(Sensitivity(bits="2", vectors=0, layers=("self_attn",)), subject)
    assert found["name"].tolist() == ["1.layers.0.self_attn", "1.layers.0.self_attn.out_proj"]
    for i, name in enumerate(found["weights"]):
        after, _ = evaluated(subject, {name: lambda p: quantised(p, 2, "channel", 64)})
        assert found["loss_increase"][i, 0] == pytest.approx((after - evaluated(subject, {})[0]).mean(), abs=1e-12)
    with pytest.raises(ValueError, match="--layers conv matches no unit"):
        Sensitivity(layers=("conv",)).plan(subject)


def test_channels_of_gpt2_are_columns_and_its_tied_embedding_is_one_unit() -> None:
    torchvision_models()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    tokens = torch.randint(40, (4, 7), generator=torch.Generator().manual_seed(0))
    subject = Subject(model, [(tokens, tokens[:, 0])], forward=lambda m, x: m(x).logits[:, -1])
    found = run_probe(Sensitivity(bits="3", vectors=2), subject)
    assert found["name"].tolist()[:2] == ["transformer.wte", "transformer.h.0.attn.c_attn"]
    assert not any("wpe" in text or "lm_head" in text for text in found["weights"])
    for i, name in enumerate(found["weights"]):
        columns = "h.0" in name
        after, _ = evaluated(subject, {name: lambda p, t=columns: quantised(p.T if t else p, 3, "channel", 64).T
                                       if t else quantised(p, 3, "channel", 64)})  # fmt: skip
        assert found["loss_increase"][i, 0] == pytest.approx((after - evaluated(subject, {})[0]).mean(), abs=1e-12)
    assert Sensitivity(unit="head").plan(subject).labels["weights"][1][0].startswith("transformer.h.0.attn.c_attn")


# --- statistics ---


@pytest.mark.slow
def test_rank_correlations_are_those_of_scipy_and_intervals_cover() -> None:
    from scipy.stats import spearmanr

    random, covered, truth = np.random.default_rng(0), 0, 6 / np.pi * np.arcsin(0.7 / 2)
    for _ in range(400):
        x, y = random.multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], size=30).T
        r, low, high = rank_correlation(x, y)
        assert r == pytest.approx(spearmanr(x, y).statistic)
        covered += low < truth < high
    assert 0.92 < covered / 400 < 0.98
    assert np.isnan(rank_correlation(x[:3], y[:3])).all()
    assert rank_correlation(np.r_[x, np.inf], np.r_[y, 1.0]) == rank_correlation(x, y)


def test_errors_over_parts_are_those_of_a_bootstrap_over_samples() -> None:
    random = np.random.default_rng(0)
    values = random.exponential(size=1603)
    parts = np.array_split(values, 64)
    mean, error = over_parts(np.array([part.sum() for part in parts]), np.array([len(part) for part in parts]))
    again = values[random.integers(len(values), size=(2000, len(values)))].mean(axis=1)
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(again.std(), rel=0.25)


# --- bit-widths ---


def made_up(increase: np.ndarray, sizes: list[int]) -> dict[str, np.ndarray]:
    """A finished result of one mini-batch of 16 samples at 8, 4 and 2 bits."""
    units, settings = increase.shape
    spread = np.linspace(0.5, 1.5, 8)
    sums = np.zeros((1, settings, units + 1, 8))
    sums[0, :, 1:] = increase.T[:, :, None] * spread * 2
    sums[0, :, 0] = sums[0, :, 1:].sum(axis=1) * 1.5
    return {
        "name": np.array([f"layer{i}" for i in range(units)]), "weights": np.array(["w"] * units),
        "size": np.array(sizes), "method": np.array(["quantise"] * settings), "level": np.array([8.0, 4.0, 2.0]),
        "setting": np.arange(settings), "loss_increase": increase, "loss_increase_se": np.abs(increase) / 10,
        "part_loss_increase": sums, "samples": np.full((1, settings, units + 1), 16.0),
        "done": np.ones((1, settings, units + 1)), "together_loss_increase": 1.5 * increase.sum(axis=0),
        "together_loss_increase_se": np.full(settings, 0.1), "additivity_error": 0.5 * increase.sum(axis=0),
        "additivity_error_se": np.full(settings, 0.1),
    }  # fmt: skip


@pytest.mark.slow
def test_the_table_is_the_best_of_all_and_keeps_the_budget() -> None:
    random = np.random.default_rng(0)
    for _ in range(8):
        increase = np.cumsum(random.exponential(size=(5, 3)), axis=1)
        sizes = random.integers(10, 1000, size=5)
        found = bit_table(made_up(increase, list(sizes)), "4.5")
        widths = np.array([8, 4, 2])
        tables = [np.array(table) for table in itertools.product(range(3), repeat=5)]
        fitting = [table for table in tables if sizes @ widths[table] <= 4.5 * sizes.sum()]
        best = min(increase[np.arange(5), table].sum() for table in fitting)
        assert found.expected == pytest.approx(best)
        assert found.mean_bits <= 4.5
        assert found.expected_se > 0
        assert found.held_out == pytest.approx(found.expected)  # both halves have increases in the same proportions


def test_noise_does_not_make_fewer_bits_look_better() -> None:
    increase = np.array([[0.0, -0.5, -0.2], [0.0, 0.1, 1.0]])
    assert bit_table(made_up(increase, [10, 10]), "8").bits.tolist() == [2, 8]
    increase = np.array([[0.3, -0.5, 0.4], [0.0, 0.1, 1.0]])  # 8 bits lose as much, so that 4 gain nothing beside them
    assert bit_table(made_up(increase, [10, 10]), "8").bits.tolist() == [4, 8]


def test_budgets_are_bits_or_bytes_and_too_small_ones_are_refused() -> None:
    data = made_up(np.array([[0.0, 0.1, 1.0], [0.0, 0.1, 1.0]]), [1000, 3000])
    assert bit_table(data, "2kB").mean_bits <= 4.0
    assert bit_table(data, "2kB").bytes <= 2000
    for budget, said in (("1.5", "below 2 bits for every weight"), ("0.5kB", "1,000 bytes"), ("four", "mean bits")):
        with pytest.raises(OptionError, match=said):
            bit_table(data, budget)
    data["method"] = np.array(["prune"] * 3)
    with pytest.raises(ValueError, match="no quantisation"):
        bit_table(data, "4")


@pytest.mark.slow
def test_show_and_export_give_the_table_with_its_assumption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: object) -> str:
        assert exit_code([str(word) for word in words]) == 0
        return capsys.readouterr().out

    path = tmp_path / "r.h5"
    data = reader.result(path, run(Sensitivity(bits="8,4,2", vectors=0), tanh_net(), path).group)
    table: BitTable = bit_table(data, "5")
    said = command("show", path, "--budget", 5)
    assert "if the increases of single units add up" in said
    assert f"{float(data['additivity_error'][1]):+.4g}" in said
    command("export", path, "--format", "bits", "--budget", 5, "--out", tmp_path / "out", "--quiet")
    (file,) = (tmp_path / "out").iterdir()
    held: dict[str, Any] = json.loads(file.read_text())
    assert held["bits"] == dict(zip(["0", "2"], table.bits.tolist(), strict=True))
    assert held["weights"] == {"0": ["0.weight"], "2": ["2.weight"]}
    assert json.loads(command("show", path, "--budget", 5, "--json"))[0]["bits"] == held["bits"]


# --- the figures ---


def test_the_figures_show_every_unit_and_both_sums() -> None:
    data = run(Sensitivity(bits="8,4,2", vectors=2), tanh_net(), None).data
    assert data is not None
    left, right = Figure().subplots(1, 2)
    drawn_sensitivity.draw(data, (left, right))
    assert [text.get_text() for text in left.get_xticklabels()] == ["0", "2"]
    assert [text.get_text() for text in right.get_xticklabels()] == ["8 bits", "4 bits", "2 bits"]
    labels = left.get_legend_handles_labels()[1]
    assert labels == ["8 bits", "4 bits", "2 bits"]
    ax = sensitivity_predictor.draw(data, Figure().subplots())
    drawn = sum(len(line.get_xdata()) for line in ax.lines)
    assert drawn == data["loss_increase"].size

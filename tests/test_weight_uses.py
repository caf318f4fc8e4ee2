"""Filters by the use of a weight, tables that do not move, and surfaces that do not depend on the layout of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from analytic import batches_of, run_probe
from foreign import torchvision_models
from torch import Tensor, nn

from landscape import models
from landscape.probe import Probe
from landscape.probes.line import Line
from landscape.probes.surface import Surface
from landscape.subject.subject import Subject
from landscape.weight_space.directions import POSITIONS, Filters, random_direction
from landscape.weight_space.weight_uses import WeightUses, not_moved, weight_uses

pytestmark = pytest.mark.slow

SMALL = {"vocab_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "num_labels": 3}
VISION = {"num_labels": 3, "image_size": 16, "patch_size": 4}


class Net(nn.Module):
    """A function of the input and of parameters with the given names and shapes."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], /, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _uses(model: nn.Module, shape: Sequence[int] = (5, 6)) -> WeightUses:
    return weight_uses(Subject(model.double().eval(), batches_of(shape, (4,), 3)), "filter", POSITIONS)


def _tokens(model: nn.Module) -> Subject:
    inputs = torch.randint(3, 40, (4, 7), generator=torch.Generator().manual_seed(0))
    return Subject(model.double().eval(), [(inputs, torch.arange(4) % 3)])


USES: dict[str, tuple[Net, dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]] = {
    "x @ w": (Net(lambda n, x: x @ n.w, w=(6, 3)), {"w": ((6, 3), (0,))}),
    "linear": (Net(lambda n, x: F.linear(x, n.w), w=(3, 6)), {}),
    "a scaled copy": (Net(lambda n, x: x @ (2 * n.w).t().contiguous(), w=(3, 6)), {}),
    "w @ x": (Net(lambda n, x: n.w @ x, w=(3, 5)), {}),
    "columns of a packed weight": (
        Net(lambda n, x: sum(x @ part for part in n.w.chunk(3, dim=1)), w=(6, 9)), {"w": ((6, 9), (0,))},
    ),
    "heads": (Net(lambda n, x: torch.einsum("bni,hio->bnho", x, n.w), w=(2, 6, 4)), {"w": ((2, 6, 4), (1,))}),
    "merged heads": (
        Net(lambda n, x: torch.einsum("bnhi,hio->bno", x.unflatten(-1, (2, 3)), n.w), w=(2, 3, 6)),
        {"w": ((2, 3, 6), (0, 1))},
    ),
    "experts (in, out)": (
        Net(lambda n, x: torch.bmm(x.transpose(0, 1), n.w), w=(5, 6, 4)), {"w": ((5, 6, 4), (1,))},
    ),
    "experts (out, in)": (
        Net(lambda n, x: torch.einsum("bei,eoi->beo", x, n.w), w=(5, 4, 6)), {"w": ((5, 4, 6), (2,))},
    ),
    "experts of a flat weight": (
        Net(lambda n, x: torch.bmm(x.transpose(0, 1), n.w.view(5, 6, 4)), w=(30, 4)), {"w": ((5, 6, 4), (1,))},
    ),
    "experts by the input": (
        Net(lambda n, x: torch.einsum("bni,bnio->bno", x, n.w[(x.sum(-1) > 0).long()]), w=(2, 6, 4)),
        {"w": ((2, 6, 4), (1,))},
    ),
    "experts one by one": (Net(lambda n, x: x @ n.w[0] + x @ n.w[1], w=(2, 6, 4)), {"w": ((2, 6, 4), (1,))}),
    "stacked": (
        Net(lambda n, x: x @ torch.stack([n.v, n.w]).unsqueeze(1), v=(6, 4), w=(6, 4)),
        {"v": ((6, 4), (0,)), "w": ((6, 4), (0,))},
    ),
    "a vector": (Net(lambda n, x: x @ n.w, w=(6, 1)), {"w": ((6, 1), (0, 1))}),
    "transposed convolution": (
        Net(lambda n, x: F.conv_transpose1d(x, n.w), w=(5, 3, 2)), {"w": ((5, 3, 2), (0, 2))},
    ),
    "transposed convolution in groups": (
        Net(lambda n, x: F.conv_transpose1d(x.mT, n.w, groups=2), w=(6, 3, 2)), {"w": ((2, 3, 3, 2), (1, 3))},
    ),
    "convolution": (Net(lambda n, x: F.conv1d(x, n.w), w=(3, 5, 2)), {}),
    "vmap": (Net(lambda n, x: torch.vmap(lambda row: row @ n.w)(x), w=(6, 3)), {"w": ((6, 3), (0,))}),
    "rows": (Net(lambda n, x: n.w[x.abs().long().clamp(max=8)], w=(9, 3)), {}),
    "a token": (Net(lambda n, x: torch.cat([n.w.expand(len(x), 1, 6), x], 1), w=(1, 1, 6)), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", USES)
def test_a_filter_is_what_one_output_unit_sums_over(case: str) -> None:
    model, expected = USES[case]
    found = _uses(model)
    assert {name: (filters.shape, filters.summed) for name, filters in found.filters.items()} == expected
    assert (found.added, found.unknown) == ((), ())
    assert found.identity == "random" or expected


UNCLEAR = {
    "two ways": Net(lambda n, x: x @ n.w @ n.w.T, w=(6, 3)),
    "a product of two parameters": Net(lambda n, x: x @ (n.v @ n.w), v=(6, 2), w=(2, 3)),
    "elementwise": Net(lambda n, x: x * n.w, w=(5, 6)),
    "of constant features": Net(lambda n, x: x + torch.ones(5, 4).to(x) @ n.w, w=(4, 6)),
    "an error": Net(lambda n, x: x @ n.v[:7], v=(8, 3)),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_an_unclear_use_is_named_and_dim_0_numbers_the_filters(case: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        found = _uses(UNCLEAR[case])
    names = tuple(name for name, _ in UNCLEAR[case].named_parameters())
    assert (found.unknown, found.filters) == (names, {})
    assert found.words == f"use unclear, along dim 0: {', '.join(names)}"
    assert found.words.rpartition(": ")[2] in caplog.text


ADDED = {
    "a table": Net(lambda n, x: x + n.w, w=(1, 5, 6)),
    "a part of a table": Net(lambda n, x: n.w[:5].expand(len(x), -1, -1) + x, w=(9, 6)),
    "an interpolated table": Net(lambda n, x: x + F.interpolate(n.w, size=6), w=(1, 5, 9)),
    "looked up by position": Net(lambda n, x: x + F.embedding(torch.arange(5), n.w), w=(9, 6)),
    "an attention bias": Net(lambda n, x: F.scaled_dot_product_attention(x, x, x, attn_mask=n.w[_distances()].mT[0]),
                             w=(5, 1)),
    "a bias per expert": Net(lambda n, x: torch.baddbmm(n.w, x, x.mT), w=(5, 5)),
}  # fmt: skip


def _distances() -> Tensor:
    return (torch.arange(5)[:, None] - torch.arange(5)).abs()


@pytest.mark.parametrize("case", ADDED)
def test_what_is_only_added_does_not_move(case: str) -> None:
    assert _uses(ADDED[case]).added == ("w",)


def test_norm_scales_of_any_shape_and_named_positions_do_not_move() -> None:
    assert _uses(nn.Sequential(nn.LayerNorm((5, 6)), nn.Linear(6, 3))).added == ("0.weight", "0.bias")
    net = Net(lambda n, x: x + n.embed_positions[(x > 0).long()[..., 0].cumsum(1)], embed_positions=(9, 6))
    assert _uses(net).added == ("embed_positions",)


@pytest.mark.parametrize("name", [name for name in models.NAMES if name.endswith("_demo")])
def test_own_networks_have_the_directions_of_their_weights_alone(name: str) -> None:
    torch.manual_seed(0)
    assert _uses(models.build(name, classes=3, image_size=16), (3, 16, 16)) == WeightUses()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_programs_and_compiled_models_are_recorded() -> None:
    model = _Program().double().eval()
    inputs = torch.zeros(4, 5, 6, dtype=torch.float64)
    for program in (
        torch.jit.script(model), torch.jit.trace(model, inputs), torch.compile(model, backend="eager"),
        torch.export.export(model, (inputs,)).module(),
    ):  # fmt: skip
        found = weight_uses(Subject(program, [(inputs, torch.zeros(4).long())]), "filter", POSITIONS)
        assert list(found.filters.values()) == [Filters((6, 3), (0,))]
        assert len(found.added) == 1


class _Program(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.w = nn.Parameter(torch.ones(5, 6)), nn.Parameter(torch.ones(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return ((x + self.table) @ self.w).mean(1)


def test_a_model_in_training_mode_is_rejected_before_a_pass_changes_it() -> None:
    norm = nn.BatchNorm1d(5)
    subject = Subject(nn.Sequential(norm, USES["x @ w"][0]).double(), batches_of((5, 6), (4,), 3))
    with pytest.raises(ValueError, match="training mode"):
        weight_uses(subject, "filter", POSITIONS)
    assert norm.num_batches_tracked == 0


def _gpt2() -> nn.Module:
    torchvision_models()
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
    config = transformers.GPT2Config(vocab_size=40, num_labels=3, pad_token_id=0, **sizes)
    return transformers.GPT2ForSequenceClassification(config)  # type: ignore[no-any-return]


def _with_linear_layers(model: nn.Module) -> nn.Module:
    """The same function with `nn.Linear`, (out, in), where GPT-2 has weights (in, out)."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D":
            weight = module.get_parameter("weight").detach()
            linear = nn.Linear(*weight.shape)
            with torch.no_grad():
                linear.weight.copy_(weight.T)
                linear.bias.copy_(module.get_parameter("bias"))
            model.set_submodule(name, linear)
    return model


@pytest.mark.parametrize("probe", [Surface(resolution="3"), Line(resolution=3, directions=2)])
def test_both_layouts_of_gpt2_have_one_surface(probe: Probe) -> None:
    stored, linear = _tokens(_gpt2()), _tokens(_with_linear_layers(_gpt2()))
    found, expected = run_probe(probe, stored), run_probe(probe, linear)
    assert np.ptp(expected["loss"]) > 0.1
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-10)
    assert found["facts"]["not_moved"] == "transformer.wpe.weight; biases and norm scales (18)"
    assert found["facts"]["filters"].startswith("not along dim 0: transformer.h.0.attn.c_attn.weight, ")
    assert "filters" not in expected["facts"]


def test_filters_of_gpt2_have_the_norms_of_the_weights_by_output_unit() -> None:
    subject = _tokens(_gpt2())
    weights = {name: p.detach() for name, p in subject.parameters.items()}
    drawn = random_direction(weights, seed=0, axis=0, filters=weight_uses(subject, "filter", POSITIONS).filters)
    for name, direction in drawn.items():
        per_unit = (0,) if ".c_" in name else (1,)  # Conv1D: (in, out); tables and the classifier: rows
        torch.testing.assert_close(direction.norm(dim=per_unit), weights[name].norm(dim=per_unit), rtol=1e-12, atol=0)
        assert not torch.allclose(direction.norm(dim=1 - per_unit[0]), weights[name].norm(dim=1 - per_unit[0]))


SCALES = torch.tensor([0.01, 1.0, 7.0, 300.0], dtype=torch.float64)


def _scaled(case: str, scales: Tensor) -> Subject:
    """Weights of four filters, each multiplied by its scale, and a normalisation behind them that divides by it."""
    by_channel = scales[:, None]
    net = {
        "x @ w": Net(lambda n, x: (x @ n.w) / scales, w=(6, 4)),
        "experts": Net(lambda n, x: (torch.bmm(x.transpose(0, 1), n.w) / scales).transpose(0, 1), w=(5, 6, 4)),
        "one scale per expert": Net(
            lambda n, x: torch.bmm(x.transpose(0, 1)[:4], n.w).transpose(0, 1) / by_channel, w=(4, 6, 3)
        ),
        "transposed convolution": Net(lambda n, x: F.conv_transpose1d(x, n.w) / by_channel, w=(5, 4, 2)),
        "transposed convolution in groups": Net(
            lambda n, x: F.conv_transpose1d(x.mT, n.w, groups=2) / by_channel, w=(6, 2, 2)
        ),
        "rows of a table": Net(
            lambda n, x: n.w[x[..., 0].abs().long()] / scales[x[..., 0].abs().long()][..., None], w=(4, 3)
        ),
    }[case]
    factors = {
        "one scale per expert": scales[:, None, None], "transposed convolution": by_channel,
        "transposed convolution in groups": scales.view(2, 1, 2, 1).expand(2, 3, 2, 1).reshape(6, 2, 1),
        "rows of a table": by_channel,
    }.get(case, scales)  # fmt: skip
    with torch.no_grad():
        net.w.mul_(factors)
    torch.manual_seed(0)
    head = nn.LazyLinear(3, dtype=torch.float64)
    model = nn.Sequential(net, nn.ReLU(), nn.Flatten(), head).eval()
    batches = batches_of((5, 6), (8,), 3)
    with torch.no_grad():
        model(batches[0][0])
    return Subject(model, batches)


@pytest.mark.parametrize(
    "case",
    ["x @ w", "experts", "one scale per expert", "transposed convolution", "transposed convolution in groups",
     "rows of a table"],
)  # fmt: skip
def test_rescaling_single_filters_with_their_normalisation_leaves_the_surface_unchanged(case: str) -> None:
    probe = Surface(resolution="3")
    plain, scaled = (run_probe(probe, _scaled(case, s))["loss"] for s in (torch.ones_like(SCALES), SCALES))
    assert np.ptp(plain) > 0.01
    np.testing.assert_allclose(scaled, plain, rtol=1e-9)


@pytest.mark.parametrize("groups", [1, 2])
def test_modules_and_functions_have_the_same_filters(groups: int) -> None:
    layer = nn.ConvTranspose1d(6, 4, 2, groups=groups, bias=False)
    by_type = _uses(nn.Sequential(layer), (6, 5)).filters["0.weight"]
    by_use = _uses(Net(lambda n, x: F.conv_transpose1d(x, n.w, groups=groups), w=tuple(layer.weight.shape)), (6, 5))
    assert by_type == by_use.filters["w"]


def _of_transformers(name: str) -> tuple[Subject, set[str], set[str]]:
    """A tiny network, its position tables and its token tables."""
    if name == "GPT-2":
        return _tokens(_gpt2()), {"transformer.wpe.weight"}, {"transformer.wte.weight"}
    torchvision_models()
    t = pytest.importorskip("transformers", exc_type=ImportError)
    torch.manual_seed(0)
    if name == "OPT":
        sizes = {"ffn_dim": 16, "max_position_embeddings": 16, "word_embed_proj_dim": 8, "pad_token_id": 1}
        model = t.OPTForSequenceClassification(t.OPTConfig(**SMALL, **sizes))
        return _tokens(model), {"model.decoder.embed_positions.weight"}, {"model.decoder.embed_tokens.weight"}
    if name == "T5":
        model = t.T5EncoderModel(t.T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2))
        table = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return _tokens(_Encoded(model)), {f"model.{table}"}, {"model.shared.weight"}
    if name == "BERT":
        model = t.BertForSequenceClassification(t.BertConfig(**SMALL, intermediate_size=16))
        front = "bert.embeddings."
        tokens = {f"{front}word_embeddings.weight", f"{front}token_type_embeddings.weight"}
        return _tokens(model), {f"{front}position_embeddings.weight"}, tokens
    images = batches_of((3, 16, 16), (4,), 3)
    if name == "ViT":
        sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
        model = t.ViTForImageClassification(t.ViTConfig(**{**sizes, **VISION}, intermediate_size=16))
    elif name == "Swin":
        sizes = {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2}
        model = t.SwinForImageClassification(t.SwinConfig(**VISION, **sizes))
    else:
        sizes = {"hidden_sizes": [8, 8, 8], "depths": [1, 1, 1], "num_attention_heads": [2, 2, 2], "key_dim": [4, 4, 4]}
        model = t.LevitForImageClassification(t.LevitConfig(num_labels=3, image_size=64, **sizes))
        images = batches_of((3, 64, 64), (2,), 3)
    words = ("position_embedding", "relative_position_bias_table", "attention_biases")
    tables = {n for n, p in model.named_parameters() if any(word in n for word in words)}
    return Subject(model.double().eval(), images), tables, set()


class _Encoded(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.model(tokens).last_hidden_state.mean(1))
        return logits


@pytest.mark.parametrize("name", ["GPT-2", "OPT", "T5", "BERT", "ViT", "Swin", "LeViT"])
def test_position_tables_stand_still_and_token_tables_move(name: str) -> None:
    subject, positions, tokens = _of_transformers(name)
    (direction,) = (line.direction for line in Line()._lines(subject))
    still = {n for n, p in subject.parameters.items() if p.dim() >= 2} - set(direction)
    assert positions
    assert still == positions
    assert tokens <= set(direction)


def test_a_pattern_of_the_user_replaces_the_rule_and_the_run_key_changes_with_the_direction_alone() -> None:
    subject = Subject(nn.Sequential(ADDED["a table"], nn.Linear(6, 3)).double(), batches_of((5, 6), (4,), 3))
    for ignore, expected in ((POSITIONS, {"1.weight"}), ("", {"0.w", "1.weight"}), ("^1", {"0.w"})):
        (line,) = Line(ignore=ignore)._lines(subject)
        assert set(line.direction) == expected
    for model, known in ((nn.Linear(6, 3), True), (USES["x @ w"][0], False), (ADDED["a table"], False)):
        subject = Subject(nn.Sequential(model, nn.Conv1d(5, 3, 1)).double(), batches_of((5, 6), (4,), 3))
        assert (Surface().identity(subject)["plane"] == "random") is known
        assert (Line().identity(subject)["along"] == ["random"]) is known
    subject = Subject(USES["x @ w"][0], batches_of((5, 6), (4,), 3))
    assert Surface(normalize="park2022").identity(subject)["plane"] == "random"


def test_parameters_that_do_not_move_are_listed_in_short() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    model[4].bias.requires_grad_(False)
    subject = Subject(model, batches_of((6,), (4,), 3))
    weights = {name: p.detach() for name, p in subject.parameters.items()}
    assert (
        not_moved(subject, [{}])
        == "0.weight, 1.weight, 2.weight and 2 more; biases and norm scales (4); frozen parameters (1)"
    )
    assert (
        not_moved(subject, [random_direction(weights, seed=0, axis=0)])
        == "biases and norm scales (4); frozen parameters (1)"
    )
    assert not_moved(subject, [weights]) == "frozen parameters (1)"
    model[4].bias.requires_grad_(True)
    assert not_moved(subject, [dict(model.named_parameters())]) == "none"

"""Names of weights: wrappers in any nesting, prefixes, encoders of self-supervised files, and how they are reported."""

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import utils

from landscape.checkpoints.checkpoint import Checkpoint, read_checkpoint
from landscape.checkpoints.key_matching import match_keys
from landscape.checkpoints.state_dict_loading import load_into
from landscape.models.providers import advice

BODY = ["stem.weight", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"]
MODEL = [*BODY, "fc.weight", "fc.bias"]


def under(prefix: str, names: list[str]) -> list[str]:
    return [f"{prefix}{name}" for name in names]


@pytest.mark.parametrize("wrappers", list(itertools.permutations(["module.", "model.", "_orig_mod."])))
def test_wrappers_come_off_in_any_order_and_inside_names(wrappers: tuple[str, ...]) -> None:
    found = match_keys(under("".join(wrappers), MODEL), MODEL)
    assert dict(found.names) == {name: "".join(wrappers) + name for name in MODEL}
    inside = [name.replace("blocks.0.", "blocks._orig_mod.0.module.") for name in MODEL]
    assert sorted(match_keys(inside, MODEL).names) == sorted(MODEL)
    assert match_keys(inside, MODEL).unexpected == ()


def test_wrappers_come_off_the_model_too_but_not_where_they_alone_tell_names_apart() -> None:
    compiled = under("_orig_mod.", MODEL)
    assert dict(match_keys(MODEL, compiled).names) == dict(zip(compiled, MODEL, strict=True))
    both = match_keys(under("module.", MODEL), compiled).names
    assert dict(both) == dict(zip(compiled, under("module.", MODEL), strict=True))
    both = ["a.module.weight", "a.weight"]
    assert dict(match_keys(both, both).names) == {name: name for name in both}
    assert match_keys(["a.module.weight"], both).missing == ("a.weight",)


def test_a_lacking_prefix_is_added_but_blocks_that_agree_without_their_fronts_are_no_match() -> None:
    found = match_keys(BODY, [*under("backbone.", BODY), "head.weight"])
    assert (found.added, found.missing, found.unexpected) == ("backbone.", ("head.weight",), ())
    assert "with the prefix backbone." in found.words
    found = match_keys(["layers.3.weight", "other.x", "other.y"], ["blocks.1.weight", "u", "v"])
    assert not found.names
    assert len(found.unexpected) == len(found.missing) == 3


QUEUE = ["module.queue", "module.queue_ptr"]
HEAD = [*BODY, "fc.0.weight", "fc.2.weight"]
METHODS = {
    "moco": [*under("module.encoder_q.", HEAD), *under("module.encoder_k.", HEAD), *QUEUE],
    # its `fc` is the projection, under the classifier's name
    "moco-1": [*under("module.encoder_q.", MODEL), *under("module.encoder_k.", MODEL), *QUEUE],
    "moco-3": [*under("module.base_encoder.", HEAD), *under("module.momentum_encoder.", HEAD),
               *under("module.predictor.", ["0.weight", "3.weight"])],
    "simsiam": [*under("module.encoder.", [*BODY, "fc.weight"]), *under("module.predictor.", ["0.weight"])],
    "simmim": [*under("encoder.", [*BODY, "mask_token"]), "decoder.0.weight", "decoder.0.bias"],
    "mae": [*BODY, "mask_token", "decoder_embed.weight", "decoder_blocks.0.weight", "decoder_pos_embed",
            "decoder_pred.bias"],
    "dino": [*under("module.backbone.", BODY), *under("module.head.", ["mlp.0.weight", "last_layer.weight_g"])],
    "simclr": [*under("backbone.", BODY), *under("projector.", ["0.weight", "2.weight"])],
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_the_encoder_of_a_self_supervised_file_is_taken_and_the_rest_is_reported(method: str) -> None:
    names = METHODS[method]
    found = match_keys(names, MODEL)
    assert list(found.names) == BODY
    assert found.missing == ("fc.weight", "fc.bias")
    assert found.unexpected == ()
    assert sorted([*found.names.values(), *found.dropped]) == sorted(names)  # nothing is left out silently
    assert f"dropped {len(found.dropped)} (" in found.words


@pytest.mark.parametrize(
    ("method", "trained", "average"),
    [("moco", "encoder_q", "encoder_k"), ("moco-3", "base_encoder", "momentum_encoder")],
)
def test_of_two_networks_the_moving_average_is_taken_on_request(method: str, trained: str, average: str) -> None:
    assert all(trained in name for name in match_keys(METHODS[method], MODEL).names.values())
    assert all(average in name for name in match_keys(METHODS[method], MODEL, "ema").names.values())


def test_what_a_model_has_itself_is_kept_and_a_classifier_where_nothing_speaks_against_it() -> None:
    moco = METHODS["moco"]
    assert match_keys(moco, moco).dropped == ()
    found = match_keys(moco, [name.removeprefix("module.") for name in moco])
    assert (len(found.names), found.dropped, found.missing) == (len(moco), (), ())
    both = [*under("encoder.", BODY), *under("decoder.", BODY)]
    assert match_keys(under("module.", both), both).dropped == ()
    supervised = under("encoder.", MODEL)
    assert list(match_keys(supervised, MODEL).names) == MODEL
    assert match_keys([*supervised, "n_averaged", "total_ops"], MODEL).dropped == ("n_averaged", "total_ops")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def stored(state_dict: dict[str, Tensor]) -> Checkpoint:
    return Checkpoint(Path("weights.pt"), state_dict)


def test_missing_weights_stay_as_initialised_and_are_reported() -> None:
    model, other = network(), network().state_dict()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    given = {name: other[name] for name in ("0.weight", "0.bias")} | {
        "2.weight": torch.zeros(7, 3),
        "extra": torch.ones(1),
    }
    with pytest.raises(ValueError, match=r"1 missing keys \(2.bias\), 1 unexpected keys \(extra\); best match: 3 of 4"):
        load_into(model, stored(given))
    with pytest.raises(ValueError, match=r"1 missing keys"):  # the classifier has no such name
        load_into(model, stored(given), logits=False)
    taken = load_into(model, stored(given), allow_missing=True)
    assert taken.taken == "state_dict, left out 2 (extra, 2.weight), as initialised 2 (2.bias, 2.weight)"
    now = model.state_dict()
    assert torch.equal(now["0.weight"], other["0.weight"])
    for name in ("2.weight", "2.bias"):
        assert torch.equal(now[name], before[name])


def test_another_shape_names_the_arguments_of_this_kind_of_model(tmp_path: Path) -> None:
    (path := tmp_path / "mine.py").write_text("def net(width, depth=2): ...\ndef fixed(): ...")
    for spec, classes, said in (
        ("resnet18", 7, "give --model-arg classes=7"),
        ("timm:vit_tiny_patch16_224", 7, "give --model-arg num_classes=7"),
        ("timm:vit_tiny_patch16_224", None, "such as --model-arg img_size=32"),
        ("hf:folder", 7, "give --model-arg num_labels=7"),
        (f"{path}:net", 7, "takes --model-arg width=VALUE and depth=VALUE"),
        (f"{path}:fixed", None, "takes no arguments: give the function"),
    ):
        assert said in advice(spec, classes)
    model = nn.ModuleDict({"body": network(), "head": nn.Linear(2, 2)})
    given = {name: torch.zeros(5, 2) if name == "head.weight" else value for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"head\.weight is \(5, 2\) in the file and \(2, 2\).*; 5 classes, or leave"):
        load_into(model, stored(given), advice=lambda classes: f"{classes} classes")


def test_where_little_or_nothing_fits_the_mismatch_is_named() -> None:
    with pytest.raises(ValueError, match="has none of the model's 4 weights; give another --model"):
        load_into(network(), stored({"x": torch.ones(1)}), allow_missing=True)
    given = {f"student.net.{name}": tensor for name, tensor in list(network().state_dict().items())[:3]}
    with pytest.raises(ValueError, match=r"1 missing keys \(2.bias\), .* 3 of 4 without the prefix student.net.;"):
        load_into(network(), stored(given))


def test_a_classifier_may_be_missing_where_no_logits_are_used() -> None:
    model = nn.ModuleDict({"body": network(), "head": nn.Linear(2, 2)})
    given = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head")}
    with pytest.raises(ValueError, match=r"2 missing keys \(head.weight, head.bias\)"):
        load_into(model, stored(given))
    taken = load_into(model, stored(given), logits=False)
    assert taken.headless
    assert taken.missing == ("head.weight", "head.bias")


AVERAGED = ["ema_model.", "model_ema.", "ema.module.", "averaged.", "swa_model.", "momentum_model."]


@pytest.mark.parametrize("average", AVERAGED)
@pytest.mark.parametrize("first", ["raw", "average"])
def test_of_weights_and_their_average_in_one_dict_the_asked_ones_are_taken(average: str, first: str) -> None:
    networks = [under("net.", MODEL), under(average, MODEL)]
    beside = ["criterion.weight", "val_acc.total", "train_metrics.count", "ema_decay"]
    names = [*itertools.chain(*(networks if first == "raw" else networks[::-1])), *beside]
    for weights, taken, other in (("raw", "net.", average), ("ema", average, "net.")):
        found = match_keys(names, MODEL, weights)
        assert dict(found.names) == dict(zip(MODEL, under(taken, MODEL), strict=True))
        assert (found.missing, found.unexpected) == ((), ())
        assert set(found.dropped) == {*under(other, MODEL), *beside}
        assert f"dropped {len(MODEL) + 4} ({other.split('.')[0]} " in found.words


def test_losses_and_metrics_beside_the_weights_are_left_out_and_named_other_modules_are_not() -> None:
    found = match_keys([*MODEL, "criterion.weight", "val_accuracy.total"], MODEL)
    assert (found.dropped, found.unexpected) == (("criterion.weight", "val_accuracy.total"), ())
    assert match_keys([*MODEL, "blocks.2.weight"], MODEL).unexpected == ("blocks.2.weight",)
    head = match_keys([*under("model.", BODY), "head.weight"], BODY)  # without it the function would be another one
    assert head.unexpected == ("head.weight",)


def test_an_average_that_does_not_fit_is_not_replaced_by_the_raw_weights(tmp_path: Path) -> None:
    weights = network().state_dict()
    names = {f"model.{name}": tensor for name, tensor in weights.items()}
    torch.save(names | {"model_ema.flat": torch.zeros(3)}, tmp_path / "w.pt")
    load_into(network(), read_checkpoint(tmp_path / "w.pt"))
    with pytest.raises(ValueError, match=r"holds a moving average under other names \(model_ema.flat\)"):
        load_into(network(), read_checkpoint(tmp_path / "w.pt", weights="ema"))


def normalised(form: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old forms are deprecated
        return nn.Sequential(form(nn.Linear(4, 3)), nn.Tanh(), form(nn.Linear(3, 2))).eval()


class Renaming(nn.Module):
    """A layer that reads its weight transposed, under the name that it had once."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.T

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *others: Any) -> None:
        if (old := state_dict.pop(f"{prefix}old", None)) is not None:
            state_dict[f"{prefix}w"] = old.T
        super()._load_from_state_dict(state_dict, prefix, *others)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_keys_are_compared_after_the_modules_own_conversion(prefix: str) -> None:
    old, new = normalised(utils.weight_norm), normalised(utils.parametrizations.weight_norm)
    with torch.no_grad():
        for parameter in old.parameters():
            parameter += 0.5
    taken = load_into(new, stored({f"{prefix}{name}": value for name, value in old.state_dict().items()})).taken
    x = torch.randn(5, 4)
    torch.testing.assert_close(new(x), old(x))
    assert taken.endswith("converted by the model's modules")
    model, weight = nn.Sequential(Renaming(), nn.Linear(2, 2)), torch.randn(4, 2)
    given = {name: value for name, value in model.state_dict().items() if name != "0.w"} | {"0.old": weight}
    load_into(model, stored({f"{prefix}{name}": value for name, value in given.items()}))
    assert torch.equal(model.state_dict()["0.w"], weight.T)
    with pytest.raises(ValueError, match=r"1 missing keys \(0.w\), 1 unexpected keys \(0.other\)"):
        load_into(model, stored({name.replace("old", "other"): value for name, value in given.items()}))


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (utils.spectral_norm, utils.parametrizations.spectral_norm),
        (utils.parametrizations.spectral_norm, utils.spectral_norm),
        (utils.parametrizations.weight_norm, utils.weight_norm),
        (utils.parametrizations.weight_norm, lambda layer: layer),
        (lambda layer: layer, utils.parametrizations.weight_norm),
    ],
)
def test_a_form_that_torch_does_not_convert_is_named(there: Any, here: Any) -> None:
    plain = "plain weights" if "lambda" in str(there) + str(here) else ""
    message = rf"{plain}.*which PyTorch does not convert \(0\."
    with pytest.raises(ValueError, match=message):
        load_into(normalised(here), stored(dict(normalised(there).state_dict())))


def test_quantized_weights_are_refused_before_their_scales_are() -> None:
    weights = network().state_dict() | {"0.weight": torch.ones(3, 4, dtype=torch.int8), "0.weight_scale": torch.ones(3)}
    for allow_missing in (False, True):
        with pytest.raises(
            ValueError, match=r"0.weight as int8 .*: quantized weights are not scaled here; save them in"
        ):
            load_into(network(), stored(weights), allow_missing=allow_missing)

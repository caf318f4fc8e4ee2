"""Adapters of peft on tiny language models of transformers: merged by hand, and as parameters of their own."""

import json
import shutil
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign import torchvision_models
from safetensors.torch import load_file, save_file

import landscape
from landscape.cli.loading import _line_between
from landscape.options import OptionError
from landscape.probes.trace import Trace
from landscape.subject.loading.identity import digest
from landscape.subject.subject import Subject

pytestmark = pytest.mark.slow

VOCABULARY, RANK, ALPHA = 11, 2, 6
SHARED = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
KINDS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_positions": 6, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "Llama": {
        "max_position_embeddings": 6, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    },
}  # fmt: skip
TARGETS = {"GPT2": ["c_attn", "mlp.c_proj"], "Llama": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module", params=["GPT2", pytest.param("Llama", marks=pytest.mark.campaign)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in `base`, and an adapter of it in `tuned`."""
    torchvision_models()
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    path: Path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SHARED, **KINDS[request.param])
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path / "base")
    options = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS[request.param], "lora_dropout": 0.5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, by the code of peft
        wrapped = peft.get_peft_model(model, peft.LoraConfig(**options, fan_in_fan_out=request.param == "GPT2"))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(path / "tuned")
    about = path / "tuned" / "adapter_config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"base_model_name_or_path": str(path / "base")}))
    np.save(path / "tokens.npy", np.random.default_rng(0).integers(0, VOCABULARY, (6, 7)))
    return path


@cache
def loaded(folder: Path, name: str = "tuned", **options: Any) -> Subject:
    """A subject that no test changes."""
    return landscape.load(folder / name, data=str(folder / "tokens.npy"), device="cpu", **options)


def length(weights: Mapping[str, torch.Tensor]) -> float:
    """The squared length of weights."""
    return sum(float(tensor.double().square().sum()) for tensor in weights.values())


def by_hand(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the base plus alpha / r B A, transposed where the base stores them so."""
    weights = load_file(folder / "base" / "model.safetensors")
    adapter = load_file(folder / "tuned" / "adapter_model.safetensors")
    for name in [name for name in adapter if ".lora_A." in name]:
        change = ALPHA / RANK * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
        own = name.removeprefix("base_model.model.").replace(".lora_A", "")
        weights[own] = weights[own] + (change.T if folder.name.startswith("GPT2") else change)
    return weights


def test_the_merged_weights_are_those_of_the_base_plus_the_product(folder: Path) -> None:
    subject, base = loaded(folder), loaded(folder, "base")
    state = subject.model.state_dict()
    assert set(state) == set(base.model.state_dict())
    changed = [name for name, tensor in base.model.state_dict().items() if not torch.equal(tensor, state[name])]
    assert len(changed) == len(TARGETS["GPT2"])
    for name, tensor in by_hand(folder).items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-7)
    assert subject.size == base.size
    assert subject.checkpoint.taken == "adapter, merged into its base"


def test_its_own_parameters_give_the_same_loss_and_are_measured_alone(folder: Path) -> None:
    merged, separate = loaded(folder), loaded(folder, adapter="separate")
    assert separate.loss(0).item() == pytest.approx(merged.loss(0).item(), rel=1e-5)
    assert all("lora_" in name for name in separate.parameters)
    assert separate.size == sum(t.numel() for t in load_file(folder / "tuned" / "adapter_model.safetensors").values())
    assert digest(Trace(), separate) != digest(Trace(), merged)


def test_the_line_from_the_base_ends_at_the_merged_model(folder: Path, tmp_path: Path) -> None:
    assert _line_between([folder / "base", folder / "tuned"], {}, {})[0]  # what the command makes of two names
    base = loaded(folder, "base")
    found = landscape.measure("line", base, out=tmp_path / "r.h5", along=str(folder / "tuned"), resolution=3)
    ends = found["loss"].sel(t=[0.0, 1.0]).values[0]
    assert ends == pytest.approx([base.loss(0).item(), loaded(folder).loss(0).item()], rel=1e-6)
    assert ends[0] != pytest.approx(ends[1], rel=1e-3)


def test_the_scale_of_an_adapter_identifies_its_results(folder: Path, tmp_path: Path) -> None:
    other = changed(folder, tmp_path, lora_alpha=2 * ALPHA)
    subjects = [loaded(parent, adapter="separate") for parent in (folder, other)]
    assert digest(Trace(), subjects[0]) != digest(Trace(), subjects[1])
    assert subjects[0].loss(0).item() != pytest.approx(subjects[1].loss(0).item(), rel=1e-4)


def changed(folder: Path, target: Path, **entries: Any) -> Path:
    """A copy of the adapter with other entries in its configuration."""
    shutil.copytree(folder, target / "copy")
    path = target / "copy" / "tuned" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return target / "copy"


@pytest.mark.parametrize("folder", ["GPT2"], indirect=True)
@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"peft_type": "IA3"}, "an adapter of the kind IA3, expected LORA"),
        ({"megatron_config": {"a": 1}, "megatron_core": "os"}, "an adapter with megatron_config, which is not read"),
        ({"r": RANK + 1}, r"lora_A.weight is \(2, .*\) in the file and \(3, .*\) in the model; give its base"),
        ({"target_modules": ["lm_head"]}, "the file has no base_model.model.lm_head.lora_A.weight; give its base"),
        ({"target_modules": ["nothing"]}, "tuned"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_in_a_line(
    folder: Path, tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        loaded(changed(folder, tmp_path, **entries))
    assert "\n" not in str(caught.value)


def test_separate_is_for_adapters(folder: Path) -> None:
    with pytest.raises(OptionError, match=r"--adapter separate: .*base is no adapter of peft"):
        loaded(folder, "base", adapter="separate")
    with pytest.raises(OptionError, match="adapter"):
        loaded(folder, adapter="both")


def test_units_are_aligned_with_a_checkpoint_whose_tied_weights_have_one_name(folder: Path) -> None:
    """The base's file holds one name of GPT-2's embedding and classifier, which share their memory."""
    options: dict[str, Any] = {"resolution": 2, "out": None, "quiet": True}
    found = landscape.measure("align", loaded(folder), against=str(folder / "base"), **options)
    wanted = landscape.evaluate(loaded(folder, "base"))["loss"]
    np.testing.assert_allclose(found["loss"].values[:, -1], wanted, rtol=1e-5)


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    """A run of three adapters, as a trainer saves them: that of `tuned`, times a half, one and twice."""
    shutil.copy(folder / "tokens.npy", tmp_path)
    for step, factor in ((10, 0.5), (20, 1.0), (30, 2.0)):
        shutil.copytree(folder / "tuned", tmp_path / f"checkpoint-{step}")
        weights = load_file(folder / "tuned" / "adapter_model.safetensors")
        changed = {name: tensor * (factor if ".lora_B." in name else 1.0) for name, tensor in weights.items()}
        save_file(changed, tmp_path / f"checkpoint-{step}" / "adapter_model.safetensors")
    return tmp_path


STEPS = ["checkpoint-10", "checkpoint-20", "checkpoint-30"]
IN_PRODUCTS = np.array([0.5, 1.0, 2.0]) - 2.0  # B A, or B, of each step less the last


def test_a_trajectory_of_adapters_is_that_of_the_merged_weights(folder: Path, run: Path) -> None:
    found = landscape.measure("trajectory", loaded(run, STEPS[-1]), out=None, quiet=True, run=str(run))
    assert list(found["name"].values) == STEPS
    base = loaded(folder, "base").model.state_dict()
    product = length({name: tensor - base[name] for name, tensor in by_hand(folder).items()})
    np.testing.assert_allclose(found["gram"], np.outer(IN_PRODUCTS, IN_PRODUCTS) * product, rtol=1e-4)
    for name, loss in zip(STEPS, found["loss"].values, strict=True):
        assert loss == pytest.approx(loaded(run, name).loss(0).item(), rel=1e-5)


def test_a_trajectory_of_an_adapters_own_parameters_is_theirs_alone(folder: Path, run: Path) -> None:
    last = loaded(run, STEPS[-1], adapter="separate")
    found = landscape.measure("trajectory", last, out=None, quiet=True, run=str(run))
    weights = load_file(folder / "tuned" / "adapter_model.safetensors")
    moved = length({name: tensor for name, tensor in weights.items() if ".lora_B." in name})
    np.testing.assert_allclose(found["gram"], np.outer(IN_PRODUCTS, IN_PRODUCTS) * moved, rtol=1e-5)


def test_the_run_of_a_folder_is_found_beside_it(folder: Path, run: Path) -> None:
    options: dict[str, Any] = {"out": None, "quiet": True}
    found = landscape.measure("barriers", loaded(run, STEPS[-1]), snapshots="spread:3", resolution=2, **options)
    assert list(found["checkpoint_name"].values) == STEPS
    with pytest.raises(ValueError, match=r"align needs two checkpoints, got .*tuned alone: landscape align A.pt B.pt"):
        landscape.measure("align", loaded(folder), **options)

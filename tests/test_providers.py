"""Networks of timm, torchvision and transformers by name or folder, with their own preprocessing."""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from foreign import torchvision_models
from PIL import Image
from torch import nn

import landscape
from landscape import models
from landscape.checkpoints import libraries
from landscape.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from landscape.data.preprocessing import Resize
from landscape.models import huggingface, providers
from landscape.models.providers import ModelRequest
from landscape.options import OptionError
from landscape.probes.hessian import Hessian
from landscape.running.run import digest
from landscape.subject.loading import load as loading
from landscape.subject.loading.identity import attributes
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject

TINY = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
# What makes networks of timm small; their preprocessing is that of their names.
RESNET = {"model": "timm:resnet18", "model_arg": {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 8)}}
VIT = {"model": "timm:vit_tiny_patch16_224", "model_arg": {"depth": 1, "embed_dim": 12}}
CONVNEXT = {"model": "timm:convnext_tiny", "model_arg": {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)}}


@pytest.fixture(scope="module")
def timm() -> Any:
    torchvision_models()
    return pytest.importorskip("timm")


@pytest.fixture(scope="module")
def transformers() -> Any:
    torchvision_models()
    return pytest.importorskip("transformers")


def test_a_name_of_a_library_is_recognised_without_its_prefix(timm: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name, hint in (
        ("vit_tiny_patch16_224", "give --model timm:vit_tiny_patch16_224"),
        ("squeezenet1_0", "give --model torchvision:squeezenet1_0"),
        (str(tmp_path), f"give --model hf:{tmp_path}"),
        ("maker/none", "of libraries: timm:NAME, torchvision:NAME, hf:FOLDER"),
        ("vit_dmo", "similar names: vit_demo, .*; of libraries: timm:NAME"),
    ):
        with pytest.raises(ValueError, match=hint):
            landscape.load(None, model=name, data="digits", samples=4)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes of two oblong pictures."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    for name, (width, height) in zip(("ant/0", "ant/1", "bee/0", "bee/1"), [(60, 45), (41, 57)] * 2, strict=True):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    return folder


def _saved(model: Any, folder: Path, **how: Any) -> Path:
    with providers.huggingface.quiet_transformers():
        model.save_pretrained(folder, **how)
    return folder


def _vit(transformers: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.ViTConfig(**TINY, image_size=32, patch_size=8, **options)
    return transformers.ViTForImageClassification(config).eval()


def _loaded(data: Path | str, checkpoint: Path | None = None, **options: Any) -> Subject:
    return landscape.load(checkpoint, data=str(data), device="cpu", **options)


def test_a_timm_network_takes_the_classes_of_the_data_and_its_own_arguments(timm: Any, pictures: Path) -> None:
    arguments = {**VIT["model_arg"], "img_size": 32}  # type: ignore[dict-item]
    subject, again = (_loaded(pictures, model=VIT["model"], model_arg=arguments) for _ in range(2))
    assert len(subject.model.blocks) == 1  # type: ignore[arg-type]
    assert subject.model.num_classes == 2
    assert subject.batch(0)[0].shape == (4, 3, 32, 32)
    assert torch.equal(subject.loss(0), again.loss(0))


@pytest.mark.slow
def test_a_network_of_one_size_is_built_for_the_size_asked_for(
    timm: Any, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = torchvision_models().vision_transformer
    whole = theirs._vision_transformer
    monkeypatch.setattr(theirs, "_vision_transformer", lambda **made: whole(**{**made, "num_layers": 1}))
    for options in (VIT, {"model": "torchvision:vit_b_32"}):
        subject = _loaded(pictures, image_size=64, **options)
        with torch.inference_mode():
            assert subject.model(subject.batch(0)[0]).shape == (4, 2)


@pytest.mark.parametrize(
    ("spec", "arguments", "said"),
    [
        ("timm:vit_tiny_patch", {}, "vit_tiny_patch16_224"),  # a near name
        ("torchvision:resnet19", {}, "resnet18"),
        ("timm:resnet18", {"nonsense": 1}, r"timm:resnet18 failed with TypeError: .*nonsense"),
    ],
)
def test_unknown_names_and_arguments_are_refused(timm: Any, spec: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        providers.build(ModelRequest(spec, arguments))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_pixels_are_those_of_the_librarys_own_transform(timm: Any, pictures: Path) -> None:
    for options in (VIT, RESNET, CONVNEXT):
        preset = timm.get_pretrained_cfg(str(options["model"]).removeprefix("timm:")).to_dict()
        config = timm.data.resolve_data_config({"input_size": (3, 32, 32)}, pretrained_cfg=preset)
        _compare(options, pictures, timm.data.create_transform(**config))
    own = torchvision_models().SqueezeNet1_1_Weights.DEFAULT.transforms()
    _compare({"model": "torchvision:squeezenet1_1"}, pictures, own, image_size=224)


@pytest.mark.slow
def test_the_pixels_are_those_of_the_processor_in_the_folder(transformers: Any, pictures: Path, tmp_path: Path) -> None:
    processors = "transformers.models.{0}.image_processing_pil_{0}"
    vit = pytest.importorskip(processors.format("vit")).ViTImageProcessorPil
    convnext = pytest.importorskip(processors.format("convnext")).ConvNextImageProcessorPil
    for i, processor in enumerate(  # the last leaves even margins: it rounds halves of odd ones downward
        (
            vit(size={"height": 32, "width": 32}, resample=3),
            vit(size={"height": 32, "width": 32}, resample=2, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]),
            convnext(size={"shortest_edge": 32}, crop_pct=0.76),
        )
    ):
        folder = tmp_path / str(i)
        _saved(_vit(transformers), folder)
        processor.save_pretrained(folder)
        own = partial(lambda image, p: torch.tensor(p(image)["pixel_values"][0]), p=processor)
        _compare({"model": f"hf:{folder}"}, pictures, own)


def _compare(options: dict[str, Any], pictures: Path, transform: Callable[[Any], Any], image_size: int = 32) -> None:
    subject = _loaded(pictures, image_size=image_size, **options)
    inputs, targets = subject.batch(0)
    paths = {0: sorted((pictures / "ant").iterdir()), 1: sorted((pictures / "bee").iterdir())}
    expected = [[transform(Image.open(path)) for path in paths[int(target)]] for target in targets]
    for got, candidates in zip(inputs, expected, strict=True):
        assert min((got - other).abs().max() for other in candidates) < 1e-5


@pytest.mark.slow
def test_preprocessing_is_overridden_by_options_stored_and_part_of_the_run_key(
    timm: Any, pictures: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = partial(_loaded, pictures, image_size=32, **RESNET)

    with caplog.at_level("INFO", logger="landscape"):
        plain = loaded()
    assert "preprocessing of timm:resnet18: 32 px, crop 0.95, bicubic, mean 0.485 0.456 0.406" in caplog.text
    stored = json.loads(str(attributes(plain)["spec"]))
    assert (stored["crop"], stored["interpolation"], stored["std"]) == ("0.95", "bicubic", [0.229, 0.224, 0.225])
    digests = {digest(Hessian(), plain)}
    for options in ({"mean": (0.5,) * 3, "std": (0.5,) * 3}, {"interpolation": "bilinear"}, {"crop": "squash"}):
        other = loaded(**options)
        found = Spec(**{**json.loads(str(attributes(other)["spec"])), "checkpoint": None, "split": "test"})
        assert all(tuple(getattr(found, name)) == tuple(value) for name, value in options.items())
        digests.add(digest(Hessian(), other))
    assert len(digests) == 4
    said = {name: stored[name] for name in ("interpolation", "crop")}
    assert digest(Hessian(), loaded(**said)) in digests


def test_arguments_that_do_not_change_weight_shapes_are_part_of_the_run_key(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef model(scale=1):\n    net = torch.nn.Linear(4, 3)\n    net.scale = scale\n    return net\n"
        "def data():\n    return torch.ones(6, 4), torch.arange(6) % 3\n"
    )
    file = tmp_path / "mine.py"
    found = [
        digest(Hessian(), _loaded(f"{file}:data", model=f"{file}:model", model_arg=arguments))
        for arguments in ({}, {"scale": 2}, {"scale": 3}, {"scale": 3})
    ]
    assert len(set(found)) == 3
    assert found[2] == found[3]


def test_a_neighbourhood_is_part_of_the_run_key_of_a_checkpoint(tmp_path: Path) -> None:
    sizes = {"classes": 10, "image_size": 16}
    state = models.build("localvit_ti", depth=1, **sizes).state_dict()  # type: ignore[arg-type]
    found = []
    for k in (3, 5):
        arguments = {**sizes, "depth": 1, "neighbourhood": k}
        about = {"data": {"name": "digits"}, "recipe": {}, "epoch": 0, "metrics": {}, "seed": 0}
        write_checkpoint(tmp_path / f"{k}.pt", model="localvit_ti", model_args=arguments, state_dict=state, **about)  # type: ignore[arg-type]
        torch.save(state, tmp_path / "bare.pt")
        found.append(landscape.load(tmp_path / f"{k}.pt", samples=16, device="cpu"))
        named = {"model": "localvit_ti", "model_arg": {"depth": 1, "neighbourhood": k}, "data": "digits"}
        bare = landscape.load(tmp_path / "bare.pt", samples=16, device="cpu", **named)  # type: ignore[arg-type]
        assert digest(Hessian(), bare) == digest(Hessian(), found[-1])
    assert digest(Hessian(), found[0]) != digest(Hessian(), found[1])


@pytest.mark.parametrize(
    "options",
    [{"mean": (0.5,)}, {"mean": (0.5,), "std": (0.0,)}, {"interpolation": "cubic"}, {"crop": "1.5"}, {"crop": "half"}],
)
def test_preprocessing_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"--{next(iter(options))} "):
        landscape.load(None, model="timm:resnet18", data="digits", **options)


def test_small_images_of_a_named_set_are_not_cropped_unless_asked(timm: Any) -> None:
    options: dict[str, Any] = {"image_size": 32, **RESNET}
    small, whole, cropped = (
        _loaded("digits", samples=2, **words).images
        for words in ({"model": "resnet_demo"}, options, {**options, "crop": "0.5"})
    )
    picture = Image.fromarray(small.inputs[0].permute(1, 2, 0).numpy())
    expected = np.asarray(picture.resize((32, 32), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    np.testing.assert_array_equal(whole.inputs[0], expected)
    np.testing.assert_array_equal(cropped.inputs[0], Resize("bicubic", 0.5).pixels(picture, 32))


def test_a_crop_that_cuts_pictures_of_the_networks_own_size_is_a_warning(
    timm: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i, (folder, side) in enumerate([("small", 32), ("small", 32), ("large", 32), ("large", 40)]):
        path = tmp_path / folder / ("ant", "bee")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (side, side), (i, 0, 0)).save(path)

    def warned(folder: str, **options: Any) -> bool:
        caplog.clear()
        _loaded(tmp_path / folder, image_size=32, **RESNET, **options)
        return "enlarges and cuts them; if it was trained on whole pictures, give --crop 1" in caplog.text

    assert warned("small")
    assert not warned("large")
    assert not warned("small", crop="1")
    assert not warned("small", crop="0.95")


@pytest.mark.slow
def test_a_checkpoint_says_how_many_classes(timm: Any, pictures: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "weights.pt"
    torch.save(timm.create_model("resnet18", num_classes=5, **RESNET["model_arg"]).state_dict(), path)  # type: ignore[arg-type]
    net, size = loading.model_without_data(Spec(checkpoint=path, **RESNET))  # type: ignore[arg-type]
    assert (net.num_classes, size) == (5, 224)
    assert torch.equal(net.fc.weight, read_checkpoint(path).state_dict["fc.weight"])  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"the model has 5 classes and .* has 2"):
        _loaded(pictures, path, image_size=32, **RESNET)


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], Spec]:
    """Makes a checkpoint that names its architecture."""

    def write(arch: str, state: Any) -> Spec:
        torch.save(state, tmp_path / "weights.pt")
        stored = read_checkpoint(tmp_path / "weights.pt")
        object.__setattr__(stored, "arch", arch)
        monkeypatch.setattr(loading, "read_checkpoint", lambda *_, **__: stored)
        return Spec(checkpoint=tmp_path / "weights.pt")

    return write


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["timm:resnet10t", "torchvision:squeezenet1_1"])
def test_the_architecture_is_read_from_a_checkpoint_that_names_it(timm: Any, named: Any, spec: str) -> None:
    built = providers.build(ModelRequest(spec, classes=3)).state_dict()
    net, _ = loading.model_without_data(named(spec.partition(":")[2], built))
    assert all(torch.equal(tensor, built[name]) for name, tensor in net.state_dict().items())


def test_a_checkpoint_that_names_a_strange_architecture_asks_for_the_model(timm: Any, named: Any) -> None:
    with pytest.raises(ValueError, match="name the architecture with --model"):
        loading.model_without_data(named("my_network", {"weight": torch.zeros(2, 2)}))


@pytest.mark.parametrize("shard", ["5GB", "10KB"])
def test_a_folder_with_weights_is_the_network_that_wrote_it(
    transformers: Any, pictures: Path, tmp_path: Path, shard: str
) -> None:
    model = _vit(transformers, num_labels=2)
    folder = _saved(model, tmp_path / "vit", max_shard_size=shard)
    assert len(list(folder.glob("*.safetensors"))) == (1 if shard == "5GB" else len(list(folder.glob("model-*"))))
    subject = _loaded(pictures, model=f"hf:{folder}")
    with torch.inference_mode():
        expected = model(subject.batch(0)[0]).logits
    torch.testing.assert_close(subject.model(subject.batch(0)[0]).logits, expected, rtol=0, atol=0)
    assert attributes(subject)["weights_taken"] == f"weights of {folder}"
    assert subject.batch(0)[0].shape[-1] == 32


def test_a_folder_without_weights_is_seeded_and_takes_the_classes_of_the_data(
    transformers: Any, pictures: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "vit"
    folder.mkdir()
    transformers.ViTConfig(**TINY, image_size=32, patch_size=8).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    kept = {k: v for k, v in content.items() if k not in ("id2label", "label2id")}
    (folder / "config.json").write_text(json.dumps(kept))
    first, again, other = (_loaded(pictures, model=f"hf:{folder}", seed=seed) for seed in (0, 0, 1))
    assert first.loss(0) == again.loss(0) != other.loss(0)
    assert first.model.config.num_labels == 2  # type: ignore[union-attr]
    assert attributes(first)["weights_taken"] == "as built"
    deeper = _loaded(pictures, model=f"hf:{folder}", model_arg={"num_hidden_layers": 2})
    assert deeper.size > first.size
    with pytest.raises(ValueError, match="ViTConfig has no entry nonsense"):
        providers.build(ModelRequest(f"hf:{folder}", {"nonsense": 1}))


def test_weights_of_a_file_go_into_the_network_of_a_folder(transformers: Any, pictures: Path, tmp_path: Path) -> None:
    folder = _saved(_vit(transformers, num_labels=2), tmp_path / "vit")
    other = _vit(transformers, num_labels=2)
    with torch.no_grad():
        other.classifier.bias.add_(1.0)
    torch.save(other.state_dict(), tmp_path / "other.pt")
    subject = _loaded(pictures, tmp_path / "other.pt", model=f"hf:{folder}")
    assert torch.equal(subject.model.classifier.bias, other.classifier.bias)  # type: ignore[union-attr]


def test_an_encoder_without_a_head_is_refused_by_its_missing_weights(transformers: Any, tmp_path: Path) -> None:
    folder = _saved(_vit(transformers).vit, tmp_path / "encoder")
    with pytest.raises(ValueError, match=r"do not fill ViTForImageClassification: .*classifier"):
        providers.build(ModelRequest(f"hf:{folder}", weights=True))


@pytest.mark.slow
def test_a_folder_is_of_the_class_that_it_names_also_of_several(transformers: Any, tmp_path: Path) -> None:
    deit = transformers.DeiTConfig(**TINY, image_size=32, patch_size=8)
    bert = transformers.BertConfig(**TINY, vocab_size=8)
    for name, config in (
        ("DeiTForImageClassificationWithTeacher", deit), ("DeiTForImageClassification", deit),
        ("BertForMaskedLM", bert), ("BertLMHeadModel", bert),
    ):  # fmt: skip
        folder = _saved(getattr(transformers, name)(config), tmp_path / name)
        assert type(providers.build(ModelRequest(f"hf:{folder}", weights=True))).__name__ == name
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "model_type": "deit", "architectures": None}))
    assert type(providers.build(ModelRequest(f"hf:{folder}"))).__name__ == "DeiTForImageClassification"


def test_a_folder_of_something_else_is_refused(transformers: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        providers.build(ModelRequest(f"hf:{tmp_path}"))
    transformers.CLIPTextConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="neither an image classifier nor a language model"):
        providers.build(ModelRequest(f"hf:{tmp_path}"))
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ValueError, match="is not readable JSON"):
        providers.build(ModelRequest(f"hf:{tmp_path}"))


def test_a_hubs_name_is_looked_for_in_the_cache_and_nowhere_else(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="hf download maker/vit"):
        providers.build(ModelRequest("hf:maker/vit"))
    repository = tmp_path / "models--maker--vit"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abc\n")
    model = _vit(transformers)
    _saved(model, repository / "snapshots" / "0123abc")
    found = providers.build(ModelRequest("hf:maker/vit", weights=True))
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))


def test_a_network_is_identified_by_name_and_configuration_not_by_path(transformers: Any, tmp_path: Path) -> None:
    folders = [_saved(_vit(transformers), tmp_path / name) for name in ("one", "two")]
    one, two = (providers.identity(f"hf:{folder}", {}) for folder in folders)
    assert one == two
    assert providers.identity("timm:resnet18", {}) == "timm:resnet18"
    assert providers.identity("timm:resnet18", {"act_layer": "gelu"}) != "timm:resnet18"
    assert providers.identity("resnet18", {"classes": 5}) is None


def test_callables_of_files_and_modules_are_sources_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\ndef net(width=2):\n    return torch.nn.Linear(width, 3)\ndef text():\n    return 'x'\n"
    )
    made = providers.build(ModelRequest(f"{file}:net", {"width": 4}))
    assert isinstance(made, nn.Linear)
    assert made.in_features == 4
    assert isinstance(providers.build(ModelRequest("torch.nn:Identity")), nn.Identity)
    with pytest.raises(ValueError, match=r"returned a str, expected a torch.nn.Module"):
        providers.build(ModelRequest(f"{file}:text"))


def test_code_that_imports_a_torchvision_without_its_operators_is_imported_once_more(tmp_path: Path) -> None:
    torchvision_models()
    (tmp_path / "mine.py").write_text(
        "import sys, torch\n"
        "if not hasattr(sys, 'cured_once'):\n"
        "    sys.cured_once = True\n"
        "    raise RuntimeError('operator torchvision::nms does not exist')\n"
        "net = torch.nn.Identity\n"
    )
    try:
        assert isinstance(providers.build(ModelRequest(f"{tmp_path / 'mine.py'}:net")), nn.Identity)
    finally:
        del sys.cured_once  # type: ignore[attr-defined]


def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision_models()
    for name, extra in libraries.EXTRAS.items():
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ValueError, match=rf"{name} is not installed.*landscape-probes\[{extra}\]"):
                libraries.library(name)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """sys.modules without torchvision, put back at the end."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchvision"}
    for name in kept:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    sys.modules.update(kept)


def test_a_torchvision_that_imports_is_left_alone(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    healthy = ModuleType("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", healthy)
    defined: list[Any] = []
    monkeypatch.setattr(torch.library, "Library", lambda *words: defined.append(words))
    assert libraries.library("torchvision") is healthy
    assert defined == []


def test_other_import_errors_of_torchvision_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('something else')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="something else"):
        libraries.library("torchvision")


@pytest.mark.parametrize("entry", ["num_labels", "num_hidden_layers"])
def test_a_configuration_of_a_thousand_million_is_refused(entry: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", entry: 10**9}))
    with pytest.raises(ValueError, match=f"has {entry} 1,000,000,000, expected at most"):
        huggingface.build(str(tmp_path), {}, classes=None, image_size=None, weights=False)

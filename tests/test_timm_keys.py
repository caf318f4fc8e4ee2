"""Weights under the names of an older timm."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign import torchvision_models
from torch import Tensor

import landscape
from landscape.models import providers
from landscape.models.providers import ModelRequest
from landscape.subject import other_networks
from landscape.subject.loading import load as loading
from landscape.subject.spec import Spec


@pytest.fixture(scope="module")
def timm() -> Any:
    torchvision_models()
    return pytest.importorskip("timm")


def of_timm_0_5(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names of a Swin or PiT as timm 0.5.4 saved them, with the buffers that it saved."""
    names = {"head.fc.": "head."} if any("downsample" in name for name in state) else {}
    old = {}
    for name, tensor in state.items():
        name = re.sub(r"layers\.(\d)\.downsample", lambda at: f"layers.{int(at[1]) - 1}.downsample", name)
        name = re.sub(r"transformers\.(\d)\.pool", lambda at: f"pools.{int(at[1]) - 1}", name)
        for new, before in names.items():
            name = name.replace(new, before)
        old[name] = tensor
    if names:
        old["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.long)
        old["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    return old


SMALL_TIMM = {
    "swin_transformer:SwinTransformer": {
        "img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 2, 2), "num_heads": (1, 2, 2),
    },
    "pit:PoolingVisionTransformer": {
        "img_size": 32, "patch_size": 4, "stride": 2, "stem_type": "overlap", "base_dims": (4, 4, 4),
        "depth": (1, 1, 1), "heads": (1, 2, 2), "mlp_ratio": 2,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_TIMM)
def test_names_of_an_older_timm_are_those_of_the_installed_one(timm: Any, tmp_path: Path, name: str) -> None:
    module, kind = name.split(":")
    file = tmp_path / "mine.py"
    file.write_text(
        f"import torch\nfrom timm.models.{module} import {kind}\n"
        f"def model(classes=5): return {kind}(num_classes=classes, **{SMALL_TIMM[name]!r})\n"
        "def data(): return torch.zeros(4, 3, 32, 32), torch.arange(4)\n"
    )
    torch.manual_seed(3)
    made = providers.build(ModelRequest(f"{file}:model"))
    old = of_timm_0_5(made.state_dict())
    assert old.keys() - made.state_dict().keys()
    options: dict[str, Any] = {"model": f"{file}:model", "data": f"{file}:data"}
    for wrapper in ("", "model.", "module."):
        wrapped = {f"{wrapper}{own}": tensor for own, tensor in old.items()}
        torch.save({"state_dict": wrapped}, tmp_path / "old.pth.tar")
        subject = landscape.load(tmp_path / "old.pth.tar", **options)
        for key, tensor in made.state_dict().items():
            torch.testing.assert_close(subject.model.state_dict()[key], tensor, rtol=0, atol=0)
        assert "renamed from an older timm" in subject.checkpoint.taken
        stored = other_networks.read_beside(subject, tmp_path / "old.pth.tar").state_dict
        assert made.state_dict().keys() <= {key.removeprefix(wrapper) for key in stored}
    for epoch in (1, 2, 3):
        factor = 1 + epoch / 10
        moved = {own: tensor * factor if tensor.is_floating_point() else tensor for own, tensor in wrapped.items()}
        torch.save(moved, tmp_path / f"epoch_{epoch}.pth")
    (tmp_path / "old.pth.tar").unlink()
    found = landscape.measure("trajectory", tmp_path, out=None, quiet=True, **options)
    np.testing.assert_allclose(found["radius"].values, [1, 0.5, 0], rtol=1e-5)
    torch.save({own: tensor for own, tensor in wrapped.items() if "norm1" not in own}, tmp_path / "less.pth")
    with pytest.raises(ValueError, match=r"less.pth does not fit the model: \d+ missing keys \(.*norm1"):
        landscape.load(tmp_path / "less.pth", **options)


def test_a_tensor_of_another_size_is_refused_although_timm_could_resample_it(timm: Any, tmp_path: Path) -> None:
    arguments = {"depths": (1, 1, 1, 1), "embed_dim": 8, "num_heads": (1, 1, 1, 1), "img_size": 56}
    made = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **arguments)
    torch.save(of_timm_0_5(made.state_dict()), tmp_path / "old.pth")
    words = {"model": "timm:swin_tiny_patch4_window7_224", "logits": False}
    spec = Spec(checkpoint=tmp_path / "old.pth", model_arg=arguments, **words)  # type: ignore[arg-type]
    model, _ = loading.model_without_data(spec)
    assert model.get_submodule("head.fc").out_features == 5  # as many classes as the file
    wider = replace(spec, model_arg={**arguments, "window_size": 14})
    with pytest.raises(ValueError, match=r"old.pth does not fit the model: "):
        loading.model_without_data(wider)

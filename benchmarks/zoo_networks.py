"""The networks of three libraries with random weights: their names, and how each is built with its mini-batches."""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.checkpoints.libraries import library

CLASSES = 5
MOST_PARAMETERS = 2.5e7  # of a configuration that could not be made tiny
TOKENS = 16  # of a sequence
SMALL = 64  # rows and columns of images for second derivatives
LARGEST, FEWER = 384, (224, 240, 252, 256)  # of other images, and what is tried of larger ones
HEADS = {"image": "IMAGE_CLASSIFICATION", "masked": "MASKED_LM", "causal": "CAUSAL_LM"}
LARGE = ("large", "huge", "giant", "gigantic", "enormous", "xlarge", "so400m", "so150m", "7b", "_h", "_l_", "_g_")
Made = tuple[str, nn.Module, Callable[..., Any]]  # member; network; data of so many samples, maybe of smaller images


def tiny(entries: Mapping[str, float], config: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a configuration, and of those in it, at most as large as those of matching names."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and name.endswith("_config"):
            found[name] = tiny(entries, value) | {key: value[key] for key in ("model_type",) if key in value}
        pattern = next((p for p in entries if re.fullmatch(p, name)), "")
        most = entries.get(pattern, 0)
        if value is None and (re.fullmatch(ALWAYS, name) or (name == "head_dim" and most)):
            found[name] = most or 3
        elif type(value) in (int, float) and value > most > 0:
            found[name] = most
        elif isinstance(value, list | tuple) and value and pattern and all(type(v) is int for v in value):
            found[name] = [min(v, int(most)) for v in value]
    return found


ALWAYS = "vocab_size|n_routed_experts|n_shared_experts|pad_token_id"  # entries that some configurations leave out
LAYERS: dict[str, float] = {
    "num_hidden_layers|n_layers?|num_layers|(encoder|decoder|num_encoder|num_decoder)_layers|depths": 2,
    "depth": 3,
}
TOKEN_IDS = {"(.*_)?vocab_size.*": 128, "max_position_embeddings|n_positions|n_ctx|max_seq_len": 64,
             ".*_token_id|.*_token_index": 3}  # fmt: skip
ROUTED = {"num_experts|n_routed_experts|num_local_experts|moe_num_experts": 4, "num_experts_per_tok|moe_k|top_k": 2,
          "n_group|topk_group|n_shared_experts|first_k_dense_replace": 1}  # fmt: skip
WIDTHS = {
    "hidden_size|d_model|n_embd|dim|emb_dim|embedding_size|word_embed_proj_dim|model_dim|lru_width|dim_model": 32,
    "num_(attention_)?heads|n_heads?|(encoder|decoder)_attention_heads|num_attention_heads": 4,
    "num_key_value_heads|num_kv_heads|n_head_kv": 2, "head_dim|d_kv|attention_head_size|qk_nope_head_dim|v_head_dim": 8,
    "(.*_)?intermediate_size|.*ffn_dim|d_ff|n_inner|d_inner|dim_ff|ffn_hidden_size": 64,
    "hidden_sizes|neck_hidden_sizes|layer_channels|stem_channels|d_latents|num_latents": 32, "embed_dims?": 24,
    "q_lora_rank|kv_lora_rank|qk_rope_head_dim": 8, "rotary_dim": 4, "image_size": 64,
    "mamba_n_heads|mamba_num_heads": 4, "n_groups": 2, "window_size": 2, "hidden_dim": 640,
    "mamba_d_head|mamba_head_dim": 16, "(mamba_d|ssm)_state(_size)?|state_size": 8,
    "width_coefficient": 0.5, "depth_coefficient": 0.3,
}  # fmt: skip
SMALL_NUMBERS = {**LAYERS, **TOKEN_IDS, **ROUTED, **WIDTHS}
SMALLER: tuple[dict[str, float], ...] = (  # tried one after the other
    SMALL_NUMBERS, {**SMALL_NUMBERS, "num_key_value_heads|num_kv_heads|n_head_kv": 4},
    {**LAYERS, **TOKEN_IDS, **ROUTED, "image_size": 64}, {**LAYERS, **TOKEN_IDS}, {**LAYERS, "image_size": 64}, LAYERS,
)  # fmt: skip


def names() -> list[str]:
    """Every network as library/what/name, those that are measured fastest first."""
    auto = library("transformers").models.auto.modeling_auto
    made = [
        f"transformers/{head}/{kind}"
        for head, mapping in HEADS.items()
        for kind in getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
    ]
    made += [f"timm/{module}" for module in library("timm").list_modules()]
    return made + [f"torchvision/{task}/{name}" for _, task, name in sorted(_of_torchvision())]


def _of_torchvision() -> Iterator[tuple[float, str, str]]:
    """Operations of one pass, task and name of the builders."""
    models = library("torchvision").models
    for task, module in (
        ("classification", models), ("segmentation", models.segmentation), ("detection", models.detection),
    ):  # fmt: skip
        for name in models.list_models(module=module):
            yield models.get_model_weights(name).DEFAULT.meta["_ops"], task, name


def made(name: str, member: str = "") -> Made:
    """A network by its name; `member`: of a family of timm, instead of the smallest.

    Raises:
        Exception: whatever its library raises, where it cannot be built.
    """
    torch.manual_seed(0)
    kind, _, rest = name.partition("/")
    if kind == "timm":
        return _timm(rest, member)
    return {"torchvision": _torchvision, "transformers": _transformers}[kind](rest)


def _timm(module: str, known: str) -> Made:
    timm = library("timm")
    members = [known] if known else [m for m in timm.list_models(module=module) if not m.startswith("test_")]
    smaller = [m for m in members if not any(word in m for word in LARGE)] or members

    def size(member: str) -> tuple[int, int]:
        with torch.device("meta"):
            network = timm.create_model(member)
        return sum(p.numel() for p in network.parameters()), network.default_cfg["input_size"][-1]

    member = min(smaller, key=size) if len(smaller) > 1 else smaller[0]
    network = timm.create_model(member, num_classes=CLASSES)
    return member, network, _pictures(network, *network.default_cfg["input_size"])


def _pictures(network: nn.Module, channels: int, *sides: int) -> Callable[..., Any]:
    """Samples of noise; `small`: of smaller images from then on, if the network accepts any size or can be set to.

    So are very large ones from the start.
    """

    def data(n: int, small: bool = False) -> Any:
        shown = sides
        tried = (SMALL, 2 * SMALL) if small else FEWER if min(sides) > LARGEST else ()
        for adapt in (lambda side: None, getattr(network, "set_input_size", None)):
            for side in tried:
                if shown == sides and adapt is not None and side < min(sides):
                    with contextlib.suppress(Exception), torch.no_grad():
                        adapt((side, side))
                        network(torch.randn(2, channels, side, side))
                        shown = (side, side)
        return torch.randn(n, channels, *shown), torch.arange(n) % CLASSES

    return data


def _torchvision(name: str) -> Made:
    task, _, builder = name.partition("/")
    models = library("torchvision").models
    options: dict[str, Any] = {"weights": None, "num_classes": CLASSES}
    if task != "classification":
        options["weights_backbone"] = None
    elif builder in ("googlenet", "inception_v3"):
        options["init_weights"] = True
    network = models.get_model(builder, **options)
    least = models.get_model_weights(builder).DEFAULT.meta.get("min_size", (1, 1))
    side = getattr(network, "image_size", max(SMALL, *least))
    if task == "detection":
        side = max(getattr(network.transform, "fixed_size", None) or (SMALL,))
        network = ClassScores(network)
    pictures = _pictures(network.eval(), 3, side, side)

    def dense(n: int, small: bool = False) -> Any:
        images, _ = pictures(n, small)
        return images, torch.randint(CLASSES, (n, *images.shape[2:]))

    return builder, network, dense if task == "segmentation" else pictures


class ClassScores(nn.Module):
    """Scores (N, classes) of a detection network: means over its anchors, or of a box that is the image in R-CNNs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        network: Any = self.network
        maps = network.backbone(images)
        maps = list(maps.values()) if isinstance(maps, Mapping) else [maps]
        if not hasattr(network, "roi_heads"):
            scores: Tensor = network.head(maps)["cls_logits"].mean(dim=1)
            return scores
        heads = network.roi_heads
        boxes = [F.adaptive_avg_pool2d(one, heads.box_roi_pool.output_size) for one in maps]
        return torch.stack([heads.box_predictor(heads.box_head(box))[0] for box in boxes]).mean(dim=0)


def _transformers(name: str) -> Made:
    transformers = library("transformers")
    head, _, model_type = name.partition("/")
    auto = transformers.models.auto
    architecture = getattr(auto.modeling_auto, f"MODEL_FOR_{HEADS[head]}_MAPPING_NAMES")[model_type]
    architecture = architecture if isinstance(architecture, str) else architecture[0]
    config_class = (
        getattr(transformers, architecture).config_class or auto.configuration_auto.CONFIG_MAPPING[model_type]
    )
    whole = config_class().to_dict()
    for part, inner in getattr(config_class, "sub_configs", {}).items():
        if whole.get(part, 0) is None and "text" in part:
            whole[part] = inner().to_dict()
    failures = []
    for smaller in SMALLER:
        try:
            config = config_class(**tiny(smaller, whole))
            config.use_cache = False
            config.initializer_range = 0.1  # of a tenth of it, deep networks tell no samples apart
            if head == "image":
                config.num_labels = CLASSES
            if head == "causal":
                config.is_decoder = True
            network = _built(getattr(transformers, architecture), config)
            data = _images(network, config) if head == "image" else _sequences(config)
            inputs = data(2)
            with torch.no_grad():
                network.eval()(**inputs) if isinstance(inputs, Mapping) else network(inputs[0])
        except Exception as error:  # of a configuration that does not fit together
            failures.append(error)
        else:
            return architecture, network, data
    raise failures[0]


def _built(kind: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    return kind(config)  # type: ignore[no-any-return]


def _images(network: nn.Module, config: Any) -> Callable[..., Any]:
    if hasattr(config, "vocab_size") and not hasattr(config, "image_size"):  # the colours of pixels
        return lambda n, small=False: (torch.randint(config.vocab_size, (n, TOKENS)), torch.arange(n) % CLASSES)
    within = getattr(config, "vision_config", config)
    side = getattr(within, "image_size", 64)
    side = side[0] if isinstance(side, list | tuple) else side or 64
    channels = getattr(within, "num_channels", 3)
    return _pictures(network, channels, side, side)


def _sequences(config: Any) -> Callable[[int], Any]:
    within = getattr(config, "text_config", None) or config
    vocabulary = min(getattr(within, "vocab_size", 128), 128)

    def data(n: int, small: bool = False) -> Any:
        tokens = torch.randint(4, vocabulary, (n, TOKENS))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return data

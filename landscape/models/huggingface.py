"""Build transformers models from a local folder with `config.json`, with or without its weights."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from torch import nn

from landscape.checkpoints import adapters, file_names, libraries, raw_files, user_code
from landscape.checkpoints.state_dict_loading import quiet_transformers
from landscape.data.memory import available, format_bytes
from landscape.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Crop, Preprocessing, Resize
from landscape.options import reading

CONTEXTS = ("n_positions", "max_position_embeddings", "max_sequence_length", "n_ctx")
MOST_LAYERS = 10_000
MOST_LABELS = 1_000_000
MOST_SIDE = 10_000  # of images
SQUASHED_FROM = 384  # ConvNeXt's processor crops images below this size, and squashes larger ones


def build(
    name: str, arguments: Mapping[str, Any], *, classes: int | None, image_size: int | None, weights: bool
) -> nn.Module:
    """The model that `config.json` describes.

    Its class is the one that the configuration names; if that is a bare encoder, or none, the image classifier or
    language model of the same type. The arguments, and the image size, replace entries of the configuration;
    the classes are for a folder without weights whose configuration does not say. Weights are in single precision.

    Raises:
        FileNotFoundError, ValueError: there is no such folder, or its model cannot be built or filled.
    """
    folder = file_names.huggingface_folder(name)
    content = raw_files.json_of(folder / "config.json")
    _check_depth(folder, {**content, **arguments})
    transformers = libraries.library("transformers")
    weights = weights and raw_files.holds_model(folder)
    given = dict(arguments)
    if classes and not weights and not {"id2label", "num_labels"} & {*content, *given}:
        given["num_labels"] = classes
    if image_size and isinstance(content.get("image_size"), int) and not weights:
        given.setdefault("image_size", image_size)
    with quiet_transformers():
        config = user_code.guarded(f"hf:{name}", lambda: _config(transformers, folder, given))
        kind = _kind(transformers, config, folder)

        def make() -> nn.Module:
            return user_code.guarded(f"hf:{name}", lambda: kind(config))  # type: ignore[no-any-return]

        if raw_files.holds_model(folder):
            held = sum(raw_files.files_of(folder).values())
            adapters.refuse_larger(folder, f"a {kind.__name__}", make, held)
        else:
            adapters.refuse_size(folder, make, partial(_refuse_beyond_memory, folder, f"a {kind.__name__}"))
        if not weights:
            return make()
        options = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
        model, report = user_code.guarded(f"hf:{name}", lambda: kind.from_pretrained(folder, config=config, **options))
    lacking = [*report["missing_keys"], *(str(entry) for entry in report["mismatched_keys"])]
    if lacking:
        first = ", ".join(map(str, lacking[:3]))
        raise ValueError(
            f"the weights in {folder} do not fill {kind.__name__}: {len(lacking)} missing or of another shape "
            f"({first}); give weights with a classifier"
        )
    return model  # type: ignore[no-any-return]


def _refuse_beyond_memory(folder: Path, what: str, count: int) -> None:
    if count > (free := available()):
        raise ValueError(
            f"{folder} declares {what}, which needs {format_bytes(count)} of memory, and {format_bytes(free)} is free"
        )


def _check_depth(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a network that would be made layer by layer, or label by label, without end."""
    for name, value in config.items():
        most = MOST_LABELS if name == "num_labels" else MOST_LAYERS
        if isinstance(value, Mapping):
            _check_depth(folder, value)
        elif any(word in name for word in ("layer", "depth", "block", "num_labels")):
            number = sum(n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int | float))
            if number > most:
                raise ValueError(f"{folder}/config.json has {name} {number:,}, expected at most {most:,}")


def preprocessing(name: str, image_size: int | None) -> Preprocessing | None:
    """The preprocessing in `preprocessor_config.json`, else the configuration's size and ImageNet's mean and std.

    None for a model without images.
    """
    folder = file_names.huggingface_folder(name)
    config, path = raw_files.json_of(folder / "config.json"), folder / "preprocessor_config.json"
    own = raw_files.json_of(path) if path.is_file() else {}
    if not own and "image_size" not in config and "num_channels" not in config:
        return None
    with reading(path if own else folder / "config.json"):
        size, crop = _size_and_crop(own, config)
        if not 1 <= size <= MOST_SIDE:
            raise ValueError(f"images have a size of {size:,}, expected 1 to {MOST_SIDE:,}")
        plain = own.get("do_normalize") is False
        mean, std = ((0.0,) * 3, (1.0,) * 3) if plain else (own.get("image_mean"), own.get("image_std"))
        channels = [
            [float(value) for value in values or default]
            for values, default in ((mean, IMAGENET_MEAN), (std, IMAGENET_STD))
        ]
        resample = own.get("resample")
        interpolation = Image.Resampling(resample).name.lower() if isinstance(resample, int) else "bilinear"
    return Preprocessing(image_size or size, Resize(interpolation, crop), *map(tuple, channels))


def context(name: str) -> int | None:
    """The longest sequence of tokens that a language model accepts; None if its configuration does not say."""
    config = raw_files.json_of(file_names.huggingface_folder(name) / "config.json")
    return next((int(config[key]) for key in CONTEXTS if isinstance(config.get(key), int)), None)


def _config(transformers: Any, folder: Path, given: Mapping[str, Any]) -> Any:
    config, unused = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, return_unused_kwargs=True, **given
    )
    if unused:
        raise ValueError(
            f"{type(config).__name__} has no entry {', '.join(unused)}; --model-arg takes those of config.json"
        )
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values are not reused
    return config


def _kind(transformers: Any, config: Any, folder: Path) -> Any:
    """The class that the configuration names, else an image classifier or language model of its type."""
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    tasks = ("ImageClassification", "CausalLM", "MaskedLM")
    autos = [getattr(transformers, f"AutoModelFor{task}") for task in tasks]
    known: list[Any] = []
    for kinds in (auto._model_mapping[type(config)] for auto in autos if type(config) in auto._model_mapping):
        known += kinds if isinstance(kinds, tuple) else [kinds]  # several, as with and without a teacher
    for kind in named:
        if kind in known or (
            kind is not None and kind.__name__.endswith(("Classification", "CausalLM", "LMHeadModel"))
        ):
            return kind
    if known:
        return known[0]
    raise ValueError(
        f"{folder} describes a {type(config).__name__}, for which transformers has neither an image classifier nor a "
        "language model; wrap it in a function: --model file.py:callable"
    )


def _size_and_crop(own: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, Crop]:
    """Side and crop from `size` and `crop_size`, in any form of a processor's configuration."""
    wanted = own.get("size", config.get("image_size", 224))
    cropped = own.get("crop_size")
    final = cropped.get("height") if isinstance(cropped, Mapping) else cropped
    if isinstance(wanted, list):
        wanted = wanted[0]
    if isinstance(wanted, Mapping) and "shortest_edge" in wanted:
        short = int(wanted["shortest_edge"])
        if "crop_pct" in own:  # ConvNeXt: the size after the crop
            return short, float(own["crop_pct"]) if short < SQUASHED_FROM else "squash"
        if own.get("do_center_crop", final is not None) and final:
            return int(final), min(1.0, int(final) / short)
        return short, 1.0
    if isinstance(wanted, Mapping):
        wanted = wanted.get("height", 224)
    if own.get("do_center_crop") and final and own.get("do_resize") is not False:
        return int(final), "squash" if int(final) == int(wanted) else min(1.0, int(final) / int(wanted))
    return int(wanted), "squash"

"""Build networks of other sources: `timm:`, `torchvision:`, `hf:FOLDER`, `module:callable`, `file.py:callable`."""

import difflib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from landscape.checkpoints import file_names, libraries, raw_files
from landscape.checkpoints.user_code import guarded, import_callable, parameters_of, spec_sha256, takes_any
from landscape.data.preprocessing import Crop, Preprocessing, Resize
from landscape.models import SIZES, huggingface

# Arguments of a source's networks: the number of classes, and the side of the images.
ARGUMENTS: Mapping[str, tuple[str, str]] = {
    "": ("classes", "image_size"), "timm": ("num_classes", "img_size"), "torchvision": ("num_classes", "image_size"),
    "hf": ("num_labels", "image_size"),
}  # fmt: skip
AS_BUILT = "as built"  # the origin of weights that no file provides


@dataclass(frozen=True)
class ModelRequest:
    """A request for a network."""

    spec: str  # `SOURCE:NAME`
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of its constructor
    classes: int | None = None  # of the data; None keeps the library's default
    image_size: int | None = None  # None keeps the library's default
    weights: bool = False  # load the weights in its folder, if any

    @property
    def source(self) -> str:
        """`timm`, `torchvision`, `hf`; "" for a callable."""
        source = self.spec.partition(":")[0]
        return source if source in SOURCES else ""

    @property
    def name(self) -> str:
        """Its name within the source."""
        return self.spec.partition(":")[2] if self.source else self.spec


def build(wanted: ModelRequest) -> nn.Module:
    """The network, initialised from torch's random state unless its source provides weights.

    Raises:
        ValueError: the source has no such network, or cannot build it; FileNotFoundError: there is no such folder.
    """
    maker = SOURCES[wanted.source][0] if wanted.source else _callable
    module = maker(wanted)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{wanted.spec} returned a {type(module).__name__}, expected a torch.nn.Module")
    return module


def preprocessing(wanted: ModelRequest) -> Preprocessing | None:
    """The source's preprocessing of the network's images; None if it says nothing."""
    return SOURCES[wanted.source][1](wanted) if wanted.source else None


def context(wanted: ModelRequest) -> int | None:
    """The longest sequence of tokens that a network accepts; None if its source does not say."""
    if wanted.source != "hf":
        return None
    given = [wanted.arguments[name] for name in huggingface.CONTEXTS if name in wanted.arguments]
    return int(given[0]) if given else huggingface.context(wanted.name)


def is_callable(spec: str) -> bool:
    """Whether a spec names a user's callable, `file.py:callable` or `module:callable`."""
    return ":" in spec and not ModelRequest(spec).source


def identity(spec: str, arguments: Mapping[str, Any]) -> str | None:
    """What determines the architecture of a spec beyond weights and class: code of a file or name, and arguments.

    Arguments are included although most determine shapes of weights: a stride, an epsilon or a neighbourhood does not.
    Sizes of images and classes of the bundled networks are left out: they show in the weights or in the data.
    """
    wanted = ModelRequest(spec, arguments)
    known: str | None = spec
    if wanted.source == "hf":
        config = (file_names.huggingface_folder(wanted.name) / "config.json").read_bytes()
        known = f"hf:{hashlib.sha256(config).hexdigest()}"
    elif not wanted.source:
        known = spec_sha256(spec) if ":" in spec else None
        if ":" not in spec:
            arguments = {name: value for name, value in arguments.items() if name not in SIZES}
    if not arguments:
        return known
    return f"{known or ''} {json.dumps(dict(arguments), sort_keys=True, default=str)}".lstrip()


def origin(spec: str) -> str:
    """The origin of a network's weights without a checkpoint, for messages."""
    wanted = ModelRequest(spec)
    if wanted.source == "hf":
        folder = file_names.huggingface_folder(wanted.name)
        if raw_files.holds_model(folder):
            return f"weights of {folder}"
    return AS_BUILT


def of_architecture(name: str) -> str:
    """The spec of an architecture of timm or torchvision that a checkpoint names; "" if neither knows it."""
    if not name:
        return ""
    try:
        if libraries.library("timm").is_model(name):
            return f"timm:{name}"
    except ValueError:  # not installed
        pass
    try:
        models = libraries.library("torchvision").models
        return f"torchvision:{name}" if name in models.list_models(module=models) else ""
    except ValueError:
        return ""


def spec_of(name: str) -> str:
    """The spec that a name lacks the source of: `timm:NAME`, `torchvision:NAME` or `hf:FOLDER`; "" if none knows it."""
    if (Path(name).expanduser() / "config.json").is_file():
        return f"hf:{name}"
    if "/" in name:
        try:
            return f"hf:{name}" if file_names.huggingface_folder(name) else ""
        except (OSError, ValueError):
            return ""
    return of_architecture(name)


def advice(spec: str, classes: int | None) -> str:
    """What to do where a file's weights have other shapes than the model: the arguments that its sizes follow from.

    `classes` is the number of classes of the file, if it is the classifier that differs.
    """
    source = ModelRequest(spec).source
    if ":" in spec and not source:
        names = list(parameters_of(import_callable(spec)))
        if not names:
            return f"{spec} takes no arguments: give the function that builds this network with --model"
        return f"{spec} takes --model-arg {' and '.join(f'{name}=VALUE' for name in names)}"
    of_classes, of_size = ARGUMENTS[source]
    if classes:
        return f"give --model-arg {of_classes}={classes}"
    return f"give the arguments that it was built with, such as --model-arg {of_size}=32"


def _timm(wanted: ModelRequest) -> nn.Module:
    timm = _timm_with(wanted.name)
    arguments = dict(wanted.arguments)
    if wanted.classes:
        arguments = {"num_classes": wanted.classes, **arguments}
    own = timm.get_pretrained_cfg(wanted.name)
    if wanted.image_size and own is not None and own.fixed_input_size and wanted.image_size != own.input_size[-1]:
        arguments = {"img_size": wanted.image_size, **arguments}
    return guarded(wanted.spec, partial(timm.create_model, wanted.name, pretrained=False, **arguments))  # type: ignore[no-any-return]


def _timm_preprocessing(wanted: ModelRequest) -> Preprocessing | None:
    own = _timm_with(wanted.name).get_pretrained_cfg(wanted.name)
    if own is None:
        return None
    size = wanted.image_size or wanted.arguments.get("img_size") or own.input_size[-1]
    crop: Crop = "squash" if own.crop_mode == "squash" else own.crop_pct
    side = size[0] if isinstance(size, tuple | list) else size  # the height of (height, width)
    return Preprocessing(int(side), Resize(own.interpolation, crop), tuple(own.mean), tuple(own.std))


def _timm_with(name: str) -> Any:
    timm = libraries.library("timm")
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    return timm


def _torchvision(wanted: ModelRequest) -> nn.Module:
    models = _torchvision_with(wanted.name)
    arguments = dict(wanted.arguments)
    if wanted.classes:
        arguments = {"num_classes": wanted.classes, **arguments}
    if wanted.image_size and wanted.name.startswith("vit_"):  # its position embeddings are for one size
        arguments = {"image_size": wanted.image_size, **arguments}
    return guarded(wanted.spec, partial(models.get_model, wanted.name, weights=None, **arguments))  # type: ignore[no-any-return]


def _torchvision_preprocessing(wanted: ModelRequest) -> Preprocessing | None:
    own = _torchvision_with(wanted.name).get_model_weights(wanted.name).DEFAULT.transforms()
    (size,), (short,) = own.crop_size, own.resize_size
    side = wanted.image_size or wanted.arguments.get("image_size") or size
    return Preprocessing(int(side), Resize(own.interpolation.value, size / short), tuple(own.mean), tuple(own.std))


def _torchvision_with(name: str) -> Any:
    models = libraries.library("torchvision").models
    known = models.list_models(module=models)
    if name not in known:
        raise _unknown("torchvision", name, known)
    return models


def _callable(wanted: ModelRequest) -> Any:
    try:
        function = import_callable(wanted.spec)
    except ValueError as error:
        if libraries.MISMATCH not in str(error):
            raise
        libraries.library("torchvision")  # the code imports torchvision or timm, which `library` makes possible
        function = import_callable(wanted.spec)
    if isinstance(function, nn.Module):
        raise ValueError(f"{wanted.spec} is a {type(function).__name__}; name a function that returns it, or its class")
    _refuse_arguments(wanted, function)
    return guarded(wanted.spec, partial(function, **wanted.arguments))


SOURCES: dict[str, tuple[Callable[[ModelRequest], nn.Module], Callable[[ModelRequest], Preprocessing | None]]] = {
    "timm": (_timm, _timm_preprocessing),
    "torchvision": (_torchvision, _torchvision_preprocessing),
    "hf": (
        lambda wanted: huggingface.build(
            wanted.name, wanted.arguments, classes=wanted.classes, image_size=wanted.image_size, weights=wanted.weights
        ),
        lambda w: huggingface.preprocessing(w.name, w.image_size or w.arguments.get("image_size")),
    ),
}


def _refuse_arguments(wanted: ModelRequest, function: Callable[..., Any]) -> None:
    """Reject arguments that a callable does not take, and the lack of those that it needs."""
    known = parameters_of(function)
    taken = ", ".join(f"{name}=VALUE" for name in known)
    lacking = [name for name, required in known.items() if required and name not in wanted.arguments]
    if lacking:
        raise ValueError(f"{wanted.spec} needs the argument {lacking[0]}; give --model-arg {lacking[0]}=VALUE")
    unknown = [] if takes_any(function) else [name for name in wanted.arguments if name not in known]
    if unknown:
        which = f"it takes --model-arg {taken}" if taken else "it takes none; leave --model-arg out"
        raise ValueError(f"{wanted.spec} has no argument {unknown[0]}; {which}")


def _unknown(source: str, name: str, names: list[str]) -> ValueError:
    longer = [known for known in names if known.startswith(name)]
    near = longer[:3] or difflib.get_close_matches(name, names, 3, 0.5) or names[:3]
    return ValueError(f"{source} has no model {name!r}; similar names: {', '.join(near)} (of {len(names)})")

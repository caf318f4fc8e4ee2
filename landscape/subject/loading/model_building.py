"""Build the model that a spec or checkpoint names; a file can neither run code nor claim absurd amounts of memory."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from landscape import models
from landscape.checkpoints import adapters
from landscape.checkpoints.checkpoint import Checkpoint
from landscape.checkpoints.state_dict_loading import classes_in, load_into
from landscape.checkpoints.user_code import refuse_file_alone
from landscape.data.dataset import Images
from landscape.models import providers
from landscape.models.providers import ModelRequest
from landscape.options import OptionError
from landscape.subject.spec import Spec

SOURCES = ("timm", "torchvision")  # prefixes of names that are looked up in a table, not imported
log = logging.getLogger(__name__)


def build(spec: Spec, stored: Checkpoint | None, images: Images | None) -> nn.Module:
    """The model that a spec names, else its checkpoint, freshly initialised from the spec's seed.

    Raises:
        ValueError: neither names an architecture, or it cannot be built.
    """
    with torch.random.fork_rng(devices=[]):  # a module's own initialisation draws from the global generator
        torch.default_generator.manual_seed(spec.seed)
        return _built(spec, stored, images)


def shaped(module: nn.Module, name: str) -> nn.Module:
    """The module, rejected where a lazy layer of PyTorch has not seen a sample, which gives its weights a shape."""
    if lazy := next((key for key, weight in module.named_parameters() if is_lazy(weight)), ""):
        raise ValueError(f"{name}: {lazy} has no shape yet (a lazy module); call the model on a sample first")
    return module


def with_architecture(spec: Spec, stored: Checkpoint | None) -> Spec:
    """The spec with the model that a foreign checkpoint names and a library or its folder builds, if it has none."""
    if spec.model or stored is None or stored.native:
        return spec
    whole = stored.path.is_dir() and stored.arch.startswith("hf:")  # a folder that builds its model
    name = stored.arch if whole else providers.of_architecture(stored.arch)
    if name:
        log.info("architecture %s, as %s says", name, stored.path)
    return replace(spec, model=name)


def refuse_code(stored: Checkpoint, what: str, name: str) -> str:
    """A name that a file gives, rejected if it would be imported and called: only the user may name code."""
    if ":" in name and name.partition(":")[0] not in SOURCES:
        raise ValueError(
            f"{stored.path} names code as its {what} ({name}); a checkpoint never runs any: if you trust it, "
            f"name it yourself with --{what} {name}"
        )
    return name


def _built(spec: Spec, stored: Checkpoint | None, images: Images | None) -> nn.Module:
    name, arguments = spec.model, dict(spec.model_arg)
    if not name and stored is not None and stored.module is not None:
        return stored.module
    if not name or (stored and name == stored.model):
        arguments = {**(stored.model_args if stored else {}), **arguments}
        name = name or _native_name(stored)
    wanted = ModelRequest(
        name, arguments, images.classes if images else None, spec.image_size,
        weights=stored is None or bool(stored.adapter),
    )  # fmt: skip
    if name in models.NAMES:
        sizes = {"classes": images.classes, "image_size": images.size} if images else {"classes": 10, "image_size": 32}
        make: Callable[[], nn.Module] = partial(models.build, name, **{**sizes, **arguments})
    else:
        _refuse_unknown(name)
        make = partial(providers.build, wanted)
    # what a file names may be no larger than its weights allow
    if stored is not None and (not spec.model or (stored.arch and name.endswith(f":{stored.arch}"))):
        adapters.refuse_larger(stored.path, f"a {name}", make, stored.size)
    module = make()
    classes = classes_in(stored.state_dict, module) if stored and wanted.source and not stored.adapter else None
    return providers.build(replace(wanted, classes=classes)) if classes else module


def _refuse_unknown(name: str) -> None:
    """Reject a name that is none of our models, unless it names a source or a callable."""
    refuse_file_alone("model", f"{name}.py" if Path(f"{name}.py").is_file() else name)
    if ":" not in name:
        if source := providers.spec_of(name):
            raise ValueError(f"no model of ours is named {name!r}; give --model {source}")
        try:
            models.build(name, classes=10, image_size=32)  # raises with the near names
        except ValueError as error:
            raise ValueError(f"{error}; of libraries: timm:NAME, torchvision:NAME, hf:FOLDER") from None


def _native_name(stored: Checkpoint | None) -> str:
    """The model that one of our own checkpoints names."""
    if stored is None or not stored.native:
        where = f"{stored.path} holds weights only" if stored else "no checkpoint"
        named = f" (of {stored.arch})" if stored and stored.arch else ""
        raise ValueError(f"{where}{named}; name the architecture with --model NAME or --model file.py:callable")
    return refuse_code(stored, "model", stored.model)


def with_weights(spec: Spec, stored: Checkpoint, images: Images | None) -> tuple[nn.Module, Checkpoint]:
    """The model with a checkpoint's weights, and the checkpoint, which then also says how its weights were taken."""
    model = build(spec, stored, images)
    if stored.adapter:
        merged = spec.adapter == "merged"
        model = adapters.with_adapter(model, stored.adapter, stored.state_dict, stored.path, merged=merged)
        return model, replace(stored, taken=f"adapter, {'merged into its base' if merged else 'its own parameters'}")
    if spec.adapter != Spec.adapter:
        raise OptionError(f"--adapter {spec.adapter}: {stored.path} is no adapter of peft; drop the option")
    if model is not stored.module:
        advice = partial(providers.advice, spec.model or stored.model)
        stored = load_into(model, stored, allow_missing=spec.allow_missing, logits=spec.logits, advice=advice)
    return shaped(model, spec.model or stored.model), stored

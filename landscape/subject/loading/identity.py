"""Collect everything that can change a result, which identifies it, and the attributes that are stored with it."""

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from landscape import models
from landscape.checkpoints.checkpoint import state_dict_sha256
from landscape.checkpoints.user_code import spec_sha256
from landscape.data.dataset import Batches, BatchList, Images, uneven
from landscape.models import providers
from landscape.options import counted, listed
from landscape.plugins import plugins
from landscape.probe import Identifies, Probe
from landscape.subject.loading.code_identity import object_sha256
from landscape.subject.loading.smoothing import inserted
from landscape.subject.losses import MEANINGS, NAMES, cross_entropy
from landscape.subject.spec import SmoothingOptions, Spec
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import cache_of

SIZES = 6  # sizes of mini-batches that the protocol names


def weights_sha256(subject: Subject) -> str:
    """SHA-256 of the weights as they are now; values derived from others, another loss or other data are discarded."""
    sha256 = state_dict_sha256(subject.model.state_dict())
    code = None if subject.reloadable else [object_sha256(subject.model, weights=False), loss_identity(subject)]
    cache_of(subject).discard_unless(json.dumps([sha256, code, _beside_weights(subject), subject.data.sha256]))
    return sha256


def _beside_weights(subject: Subject) -> dict[str, Any]:
    """What else a module made in Python may have changed: frozen parameters, and buffers outside its state dict."""
    frozen = [name for name, p in subject.model.named_parameters() if not p.requires_grad]
    saved = subject.model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in subject.model.named_buffers() if name not in saved}
    about = {"frozen": frozen, "buffers": state_dict_sha256(buffers) if buffers else ""}
    return {name: value for name, value in about.items() if value}


def identity(subject: Subject, uses: Iterable[str], weights: str | None = None) -> dict[str, Any]:
    """Everything that can change a result: weights, data, user code, and the fields that a probe says it uses.

    Batch size and seed are included where augmentation depends on them, batch size where the loss does; `weights` is
    the `weights_sha256` of weights that are already hashed.
    """
    weights, stored = weights or weights_sha256(subject), subject.checkpoint
    code = stored.sha256 if stored and stored.module is subject.model else None  # of a file that holds the model's code
    augmentation = subject.batches.augmentation if isinstance(subject.batches, Batches) else None
    used = {
        *uses,
        *(("batch_size", "seed") if augmentation else ()),
        *(("batch_size",) if subject.traits.coupled else ()),
    }
    fields = {"batch_size": subject.batch_size, "weight_decay": subject.weight_decay, "seed": subject.seed}
    usual = subject.losses is cross_entropy and subject.traits.name in ("", "cross-entropy")
    loss: dict[str, Any] = {} if usual else {"loss": loss_identity(subject)}
    if subject.meaning.accuracy and subject.losses in MEANINGS:
        loss["accuracy"] = subject.meaning.accuracy
    # Of a model that is built from a checkpoint or a name these follow from its architecture.
    module = {} if subject.reloadable else _beside_weights(subject)
    members: dict[str, Any] = {"members": [subject.members, subject.seed]} if subject.members else {}
    return {
        **loss, **module, **members, **({"smoothing": _smoothing(subject)} if inserted(subject.model) else {}),
        "weights": weights, "model": [type(subject.model).__qualname__, _architecture(subject) or code],
        "data": [subject.data.sha256, _code_sha256((subject.spec or Spec()).data)],
        "augmentation": asdict(augmentation) if augmentation else None,
        "spec": {name: fields[name] for name in sorted(used)},
    }  # fmt: skip


def asked(probe: Any, subject: Subject) -> dict[str, Any]:
    """The options in the run key: those that differ from their defaults, or what the probe says in their place."""
    changed = {f.name: value for f in fields(probe) if (value := getattr(probe, f.name)) != f.default}
    known = changed | dict(probe.identity(subject) if isinstance(probe, Identifies) else {})
    return {name: value for name, value in known.items() if value is not None}


def digest(probe: Probe, subject: Subject, weights: str | None = None) -> str:
    """SHA-256, shortened, of all that can change the numbers; `weights` is the digest of the weights if known."""
    about = identity(subject, probe.uses, weights)  # first: hashing discards values cached for other weights
    content = {"probe": probe.name, "parameters": asked(probe, subject), **about, **_code_of(probe)}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:10]


def _code_of(probe: Probe) -> dict[str, list[str]]:
    """The package of a probe that is not of this project, with its version, and the digest of its class."""
    if type(probe).__module__.startswith("landscape.probes."):
        return {}
    added = plugins("probes").get(probe.name)
    return {"code": [added.package if added else "", object_sha256(type(probe))]}


def attributes(subject: Subject) -> dict[str, str | int | float]:
    """The attributes that are stored with every result."""
    spec, stored = subject.spec or Spec(), subject.checkpoint
    return {
        "spec": json.dumps(asdict(spec) | ({"split": ""} if subject.data.one_part else {}), default=str),
        "checkpoint_sha256": stored.sha256 if stored else "",
        "weights_taken": stored.taken if stored else origin(subject), "epoch": stored.epoch if stored else math.nan,
        "model": spec.model or (stored.model if stored else type(subject.model).__name__), "data": subject.data.name,
        "data_sha256": subject.data.sha256, "device": str(subject.device), "batch_size": subject.batch_size,
        "samples": len(subject), "samples_available": subject.data.available, "classes": _classes(subject),
        "parameters_total": subject.size,
        "loss": loss_in_words(subject), "protocol": protocol(subject),
        "smoothing": json.dumps(_smoothing(subject)) if inserted(subject.model) else "",
        "configuration": json.dumps(_configuration(subject), default=str),
    }  # fmt: skip


def _classes(subject: Subject) -> int:
    """The number of classes of data with one class number per sample; 0 for other targets, or where it is unknown."""
    images = subject.images
    return images.classes if images is not None and images.targets.dim() == 1 and not images.counted else 0


def _configuration(subject: Subject) -> dict[str, Any]:
    """What the network was built and trained with, as its checkpoint says; empty for one of another library."""
    stored, spec = subject.checkpoint, subject.spec or Spec()
    if stored is None or not (stored.native and spec.model in ("", stored.model)):
        return {}
    arguments = models.arguments_of(stored.model, {**stored.model_args, **spec.model_arg})
    about = {"trained on": str(stored.data.get("name", "")), "seed": stored.seed}
    return {"model": stored.model, **stored.recipe, **arguments, **about}


def origin(subject: Subject) -> str:
    """Where the weights come from, in words, if not from a checkpoint."""
    return providers.origin(subject.spec.model) if subject.spec else providers.AS_BUILT


def protocol(subject: Subject, *, samples: int | None = None) -> str:
    """The measurement protocol that stands beside every number, in one line; of the first `samples` only."""
    spec, images, loss = subject.spec or Spec(), subject.images, loss_in_words(subject)
    augmented = isinstance(subject.batches, Batches) and subject.batches.augmentation is not None
    source = subject.batches if isinstance(subject.batches, BatchList) else images
    drawn = source is not None and source.drawn
    shifted = source is not None and source.shifted
    parts = [
        _data_in_words(subject, spec), _samples_in_words(len(subject) if samples is None else samples, images),
        "targets shifted to the next token" if shifted else "", _batches_in_words(subject),
        "augmented once" if augmented else "random transforms drawn once" if drawn else "no augmentation",
        _smoothing_in_words(subject), f"weight decay {subject.weight_decay:g}",
        f"mean of {subject.members} dropout masks" if subject.members else "",
        "" if loss == "cross-entropy" else f"loss {loss.rpartition('/')[2]}",
        _unlabelled_in_words(spec) if subject.dense else "", f"seed {subject.seed}",
    ]  # fmt: skip
    return ", ".join(filter(None, parts))


def of_first(subject: Subject, samples: int) -> dict[str, str]:
    """The fact that stores the protocol of the first `samples` only; none where those are all."""
    return {"protocol": protocol(subject, samples=samples)} if samples < len(subject) else {}


def _smoothing(subject: Subject) -> dict[str, str]:
    """The smoothing blocks that were inserted, by the names of their modules."""
    return {name: str(module.options) for name, module in inserted(subject.model).items()}


def _smoothing_in_words(subject: Subject) -> str:
    """How many smoothing blocks of which kind were inserted; "" for none."""
    blocks = _smoothing(subject)
    kind = next(iter(blocks.values()), "")
    other = "" if kind == str(SmoothingOptions()) else f" ({kind.replace(',', ' ')})"
    return f"smoothing at {counted(len(blocks), 'place')}{other}" if blocks else ""


def _samples_in_words(count: int, images: Images | None) -> str:
    if images is not None and images.sequences:
        return images.sequences
    return counted(count, "sample")


def _batches_in_words(subject: Subject) -> str:
    """The batch size; of mini-batches that a loader formed, their sizes if more than the last one differs."""
    count = 0 if isinstance(subject.batches, Batches) else len(subject.batches)
    sizes = [subject.samples(i) for i in range(count)]
    return f"mini-batches of {listed(sizes, SIZES)}" if uneven(sizes) else f"batch size {subject.batch_size}"


def _unlabelled_in_words(spec: Spec) -> str:
    """Which targets of pixels stand for no label: negative ones never have any."""
    chosen = f"{spec.ignore_index} and " if spec.ignore_index >= 0 else ""
    return f"class per pixel, {chosen}negative targets ignored"


def _data_in_words(subject: Subject, spec: Spec) -> str:
    """Name and split of the data, without the folder that it lies in; those made in Python have no split."""
    if subject.data.name == "in memory":
        return "data in memory"
    name = re.sub(r"(^|:)[~.]{0,2}/(.*/)?(?=[^/])", r"\1", subject.data.name)
    return f"{name} {'(one part)' if subject.data.one_part else spec.split}"


def _architecture(subject: Subject) -> str | None:
    """What determines the model beyond weights and class, whether the user or the checkpoint names it."""
    spec, stored = subject.spec or Spec(), subject.checkpoint
    if stored is None and not spec.model:
        return object_sha256(subject.model, weights=False)
    if stored is None or not (stored.native and spec.model in ("", stored.model)):
        named = providers.identity(spec.model, spec.model_arg)
        # The user's code may lie in other files than the one that is named.
        own = providers.is_callable(spec.model)
        if stored is not None and stored.adapter and spec.adapter == "separate":  # its scale is not in its weights
            return f"{named} {json.dumps(stored.adapter, sort_keys=True, default=str)}"
        return f"{named} {object_sha256(subject.model, weights=False)}" if own else named
    return providers.identity(stored.model, {**stored.model_args, **spec.model_arg})


def loss_in_words(subject: Subject) -> str:
    """The name of the loss as on the command line, or that of a function made in Python."""
    function = getattr(subject.losses, "__wrapped__", subject.losses)
    known = next((name for name, losses in NAMES.items() if losses is function), "")
    return subject.traits.name or known or getattr(function, "__qualname__", type(function).__name__)


def loss_identity(subject: Subject) -> list[str | None]:
    """Name and code of the loss: of a file its content, not its path, and what the function uses of other files."""
    code = _code_sha256(subject.traits.name)
    name = subject.traits.name.rpartition(":")[2] if code else subject.traits.name
    if subject.losses in MEANINGS:
        return [name, code]
    function = getattr(subject.losses, "__wrapped__", subject.losses)
    made = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
    return [name or made, code, object_sha256(function)]


def _code_sha256(spec: str) -> str | None:
    """SHA-256 of the file of `file.py:callable`; None for names and installed modules."""
    return spec_sha256(spec) if ":" in spec else None

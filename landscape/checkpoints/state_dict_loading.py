"""Load the weights of a checkpoint into a model, or explain which of them do not match."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from landscape.checkpoints.checkpoint import Checkpoint
from landscape.checkpoints.containers import is_average
from landscape.checkpoints.key_matching import RENAMED, KeyMatch, grouped, is_head, listed, match_keys, renamed_by_timm
from landscape.options import first_line

LIBRARY = "transformers.modeling_utils"


def is_transformers_model(model: nn.Module) -> bool:
    """Whether the class of a model is from transformers."""
    return any(kind.__module__ == LIBRARY for kind in type(model).__mro__)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without its progress bars and warnings: this project reports missing weights itself."""
    library_log: Any = import_module("transformers.utils.logging")
    verbosity, bars = library_log.get_verbosity(), library_log.is_progress_bar_enabled()
    library_log.set_verbosity_error()
    library_log.disable_progress_bar()
    try:
        yield
    finally:
        library_log.set_verbosity(verbosity)
        if bars:
            library_log.enable_progress_bar()


def read_by_transformers(model: Any, folder: Path) -> dict[str, Tensor]:
    """The weights in a folder, read by the library, which may save them under other names than its modules have.

    Raises:
        ValueError: the library cannot read it.
    """
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):  # the library initialises missing weights
            loaded, report = type(model).from_pretrained(
                folder, config=model.config, output_loading_info=True, local_files_only=True,
                ignore_mismatched_sizes=True, trust_remote_code=False,
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"{folder} cannot be read by transformers ({first_line(error)})") from None
    absent = [*report["missing_keys"], *report["mismatched_keys"]]
    fresh = {entry if isinstance(entry, str) else entry[0] for entry in absent}
    weights = {name: tensor for name, tensor in loaded.state_dict().items() if name not in fresh}
    return weights | {name: torch.empty(0) for name in report["unexpected_keys"]}


T = TypeVar("T")


def load_into(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    allow_missing: bool = False,
    logits: bool = True,
    advice: Callable[[int | None], str] | None = None,
) -> Checkpoint:
    """Copy the weights of a checkpoint into a model, whatever wrappers and prefixes are in their names.

    With `allow_missing`, weights that are missing, or have another shape, are left as initialised; without `logits`,
    when the model's outputs are not used, its classifier may be missing too. The checkpoint is returned with `taken`
    extended by the prefix that was removed, what was dropped and what is missing. `advice` says how to build a model
    with other shapes, given the file's number of classes where it is the classifier that differs.

    Raises:
        ValueError: keys are missing or unexpected, or shapes differ; lists the first few of each, and the prefix with
            which most match. With `allow_missing`: none matches.
    """
    wanted = _sized(model, checkpoint)
    given, found, renamed = _matched(model, wanted, checkpoint)
    _refuse_another_average(checkpoint, found)
    if (found.missing or found.unexpected) and not allow_missing and _converts(model):
        prefix = _converted(model, given, found)
        if prefix is not None:
            words = (f"without the prefix {prefix}" if prefix else "", "converted by the model's modules")
            return replace(checkpoint, taken=", ".join(filter(None, (checkpoint.taken, *words))), missing=())
    tied = _tied(wanted)
    missing = [name for name in found.missing if not tied[name] & found.names.keys()]
    found = replace(found, missing=tuple(missing))

    def may_miss(name: str) -> bool:
        # batch norm's counter, which PyTorch before 0.4.1 did not save and eval mode does not use
        return allow_missing or name.endswith("num_batches_tracked") or (not logits and is_head(name))

    differing = [name for name, own in found.names.items() if given[own].shape != wanted[name].shape]
    lacking = [name for name in found.missing if not may_miss(name)]
    _refuse_without_classifier(checkpoint, lacking)
    _refuse_quantized(checkpoint, wanted, given, found)
    if lacking or (found.unexpected and not allow_missing):
        raise ValueError(f"{checkpoint.path} does not fit the model: {_mismatch(found, len(wanted))}")
    for name in differing:
        if not may_miss(name):
            there, here = tuple(given[found.names[name]].shape), tuple(wanted[name].shape)
            classes = there[0] if is_head(name) and there[1:] == here[1:] else None
            what = advice(classes) if advice else "give the model of this file with --model"
            raise ValueError(
                f"{checkpoint.path} does not fit the model: {name} is {there} in the file and {here} in the model; "
                f"{what}, or leave such weights as initialised with --allow-missing"
            )
    found = found.without(differing)
    if not found.names:
        raise ValueError(f"{checkpoint.path} has none of the model's {len(wanted)} weights; give another --model")
    model.load_state_dict({name: given[own] for name, own in found.names.items()}, strict=False)
    taken = ", ".join(filter(None, (checkpoint.taken, renamed, found.words)))
    return replace(checkpoint, taken=taken, missing=found.missing)


def _sized(model: nn.Module, checkpoint: Checkpoint) -> dict[str, Any]:
    """The model's state dict, in which weights that its first pass would make have the shapes that the file states.

    Those that the file lacks stand as empty.
    """
    wanted: dict[str, Any] = model.state_dict(keep_vars=True)
    lazy = [name for name, tensor in wanted.items() if nn.parameter.is_lazy(tensor)]
    names = match_keys(checkpoint.state_dict, wanted, checkpoint.weights).names if lazy else {}
    for name in lazy:
        if name in names:
            wanted[name].materialize(checkpoint.state_dict[names[name]].shape)
    return {n: torch.empty(0) if nn.parameter.is_lazy(tensor) else tensor for n, tensor in model.state_dict().items()}


def _converts(model: nn.Module) -> bool:
    """Whether modules of their own, or parametrised ones, may read a state dict under other names than they have."""
    return any(
        module._load_state_dict_pre_hooks
        or not getattr(type(module)._load_from_state_dict, "__module__", "").startswith("torch.nn.modules.")
        for module in model.modules()
    )


def _converted(model: nn.Module, given: Mapping[str, Tensor], found: KeyMatch) -> str | None:
    """Load weights that the modules rename or reshape themselves; returns the prefix removed, None if they do not."""
    kept = [name for name in given if name not in found.dropped]
    tops = {name.split(".")[0] for name in kept}
    for prefix in dict.fromkeys((found.prefix, f"{tops.pop()}." if len(tops) == 1 else "")):
        plain = {name.removeprefix(prefix): given[name] for name in kept}
        with contextlib.suppress(RuntimeError):  # shapes that differ, which are reported instead
            if not any(model.load_state_dict(plain, strict=False)):
                return prefix
    return None


def _refuse_quantized(
    checkpoint: Checkpoint, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], found: KeyMatch
) -> None:
    for name, own in found.names.items():
        if wanted[name].is_floating_point() and not given[own].is_floating_point():
            raise ValueError(
                f"{checkpoint.path} has {own} as {str(given[own].dtype).removeprefix('torch.')} and the model as "
                f"{str(wanted[name].dtype).removeprefix('torch.')}: quantized weights are not scaled "
                "here; save them in floating point"
            )


def _refuse_another_average(checkpoint: Checkpoint, found: KeyMatch) -> None:
    """Refuse `--weights ema` where the weights that fit are not those of the average that the file holds."""
    averages = [name for name in checkpoint.state_dict if is_average(name)]
    if checkpoint.weights == "ema" and averages and found.names and not set(averages) & set(found.names.values()):
        raise ValueError(
            f"{checkpoint.path} holds a moving average under other names ({averages[0]}) than the model's; drop "
            "--weights ema, or give the average as a state dict of its own"
        )


def _refuse_without_classifier(checkpoint: Checkpoint, lacking: Sequence[str]) -> None:
    objective = checkpoint.recipe.get("objective", "classification")
    if lacking and objective != "classification" and all(map(is_head, lacking)):
        raise ValueError(
            f"{checkpoint.path} was trained without labels ({objective}) and has no classifier; measure it with "
            "fourier, variance, similarity, attention, attention-maps, tokens, probe-linear or noise --classifier "
            "linear, which need none"
        )


def _matched(
    model: nn.Module, wanted: Mapping[str, Tensor], checkpoint: Checkpoint
) -> tuple[Mapping[str, Tensor], KeyMatch, str]:
    """The tensors, under the installed library's names where it knows how, their match, and words for the renaming."""
    given: Mapping[str, Tensor] = checkpoint.state_dict
    found = match_keys(given, wanted, checkpoint.weights)
    if (found.missing or found.unexpected) and checkpoint.path.is_dir() and is_transformers_model(model):
        given = read_by_transformers(model, checkpoint.path)
        return given, match_keys(given, wanted), ""
    if found.missing and (renamed := renamed_by_timm(model, given)) is not None:
        return renamed, match_keys(renamed, wanted, checkpoint.weights), RENAMED
    return given, found, ""


def with_tied(state_dict: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the model's names, with those of which a file holds another name of the same memory alone."""
    found = dict(state_dict)
    for name, names in _tied(model).items():
        if name not in found and (other := next(iter(sorted(names & state_dict.keys())), None)) is not None:
            found[name] = state_dict[other]
    return found


def _tied(weights: Mapping[str, Tensor]) -> dict[str, set[str]]:
    """For each weight the names that share its memory: a file may hold only one of them, as safetensors must."""
    places: dict[tuple[int, torch.Size, tuple[int, ...]], set[str]] = {}
    for name, tensor in weights.items():
        places.setdefault((tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride()), set()).add(name)
    return {name: names for names in places.values() for name in names}


def _mismatch(found: KeyMatch, wanted: int) -> str:
    dropped = f"; dropped {grouped(found.dropped)}" if found.dropped else ""
    change = found.prefix or found.added
    how = f"{'without' if found.prefix else 'with'} the prefix {change}" if change else "with the names as they are"
    here, there = _form(found.missing), _form(found.unexpected)
    if here != there and "parametrizations" in here + there:
        return (
            f"the file holds {there}, the model {here}, which PyTorch does not convert "
            f"({(found.missing or found.unexpected)[0]} is missing); build the model in the form of the file"
        )
    return (
        f"{len(found.missing)} missing keys{listed(found.missing)}, {len(found.unexpected)} unexpected "
        f"keys{listed(found.unexpected)}{dropped}; best match: {len(found.names)} of {wanted} {how}; "
        "give the model of this checkpoint with --model, or leave these weights out with --allow-missing"
    )


def _form(names: Sequence[str]) -> str:
    """How weights of these names are parametrised, in words."""
    if any("parametrizations." in name for name in names):
        return "weights in the form of torch.nn.utils.parametrizations"
    old = any(name.endswith(("_g", "_v", "_orig")) for name in names)
    return "weights in the form of torch.nn.utils.weight_norm and spectral_norm" if old else "plain weights"


def with_model_keys(state_dict: Mapping[str, T], wanted: set[str]) -> dict[str, T]:
    """The same weights (or their shapes) under the model's names that match best; unmatched ones keep their own."""
    found = match_keys(state_dict, wanted)
    names = {own: name for name, own in found.names.items()} | {own: own for own in found.unexpected}
    return {names[own]: value for own, value in state_dict.items() if own in names}


def classes_in(state_dict: Mapping[str, Tensor], model: nn.Module) -> int | None:
    """The number of classes of weights that differ from a model's only in the number of rows, else None."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    fitted = with_model_keys(renamed_by_timm(model, state_dict) or state_dict, set(own))
    pairs = {(tuple(fitted[name].shape), shape) for name, shape in own.items() if name in fitted}
    differing = [(there, here) for there, here in pairs if there != here]
    rows = {there[:1] for there, _ in differing}
    alike = all(there[1:] == here[1:] and there and here for there, here in differing)
    return rows.pop()[0] if len(rows) == 1 and alike else None

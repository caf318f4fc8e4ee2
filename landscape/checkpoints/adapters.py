"""Apply an adapter of peft (LoRA, Hu et al. 2022, arXiv 2106.09685); refuse networks far larger than their weights."""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from landscape.checkpoints.libraries import library
from landscape.checkpoints.raw_files import refuse_expanding
from landscape.checkpoints.user_code import guarded, kept_rng
from landscape.options import OptionError, matching, naming

SLACK = 4 * 10**6  # bytes by which a network may exceed what `refuse_expanding` allows a file with its weights
MOST_MODULES = 50_000  # in it, which take some seconds and 200 MB without their parameters


def refuse_larger(path: Path, what: str, make: Callable[[], nn.Module], held: int) -> None:
    """Refuse a network, in a sentence `what`, that is far larger than the `held` bytes of the weights in its file.

    Raises:
        ValueError: it is larger, or has modules without end.
    """
    refuse_size(path, make, lambda count: refuse_expanding(path, what, count, held, SLACK))


def refuse_size(path: Path, make: Callable[[], nn.Module], refuse: Callable[[int], None]) -> None:
    """Call `refuse` with the bytes of the network that a file describes, before it takes memory where this can be.

    Raises:
        ValueError: what `refuse` raises, or the network has modules without end.
    """
    size = 0
    try:
        with kept_rng(), warnings.catch_warnings(), torch.device("meta"), counting(path, lambda _: None) as count:
            warnings.simplefilter("ignore")
            make()
            size = count()
    except _EndlessError:
        raise
    except Exception:  # it computes with its weights while it is built
        with kept_rng(), counting(path, refuse):
            make()
    refuse(size)


class _EndlessError(ValueError):
    pass


@contextmanager
def counting(path: Path, refuse: Callable[[int], None]) -> Iterator[Callable[[], int]]:
    """Call `refuse` with the bytes of all tensors that modules get within the block, whenever they grow.

    What it raises ends the block, even if that would report another error.
    """
    sizes: dict[int, int] = {}
    modules, total, thread = 0, 0, threading.get_ident()
    raised: list[ValueError] = []

    def added(module: nn.Module, name: str, value: Any) -> None:
        nonlocal modules, total
        if value is None or threading.get_ident() != thread:
            return
        try:
            if isinstance(value, torch.Tensor):
                total += value.nbytes - sizes.get(id(value), 0)
                sizes[id(value)] = value.nbytes
                refuse(total)
            else:
                modules += 1
                if modules > MOST_MODULES:
                    raise _EndlessError(f"{path} declares a network of more than {MOST_MODULES:,} modules; refused")
        except ValueError as error:
            raised.append(error)
            raise

    kinds = ("parameter", "buffer", "module")
    handles = [getattr(hooks, f"register_module_{kind}_registration_hook")(added) for kind in kinds]
    try:
        yield lambda: total
    except Exception:
        if raised:
            raise raised[0] from None
        raise
    finally:
        for handle in handles:
            handle.remove()


# Entries of an adapter's configuration that decide its function.
FIELDS = (
    "r", "lora_alpha", "target_modules", "exclude_modules", "fan_in_fan_out", "bias", "use_rslora", "use_dora",
    "modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "lora_bias",
    "target_parameters",
)  # fmt: skip
# Those that concern training, the initial values or the library alone.
WITHOUT_EFFECT = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode",
    "init_lora_weights", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
)  # fmt: skip


PATTERNS = ("target_modules", "exclude_modules", "layers_pattern")
RANKED = ("rank_pattern", "alpha_pattern")  # a number by pattern


@naming
def _check(path: Path, adapter: Mapping[str, Any], weights: Mapping[str, Tensor], modules: Sequence[str]) -> None:
    """Refuse a rank that the tensors of the file do not have, and a pattern that is matched without end.

    Raises:
        ValueError: one is there.
    """
    most = max((side for tensor in weights.values() for side in tensor.shape), default=0)
    for rank in (adapter.get("r") or 8, *(adapter.get("rank_pattern") or {}).values()):
        if not isinstance(rank, int) or not 0 < rank <= most:
            raise ValueError(f"{path} declares the rank {rank}, and its tensors have at most {most}; refused")
    own = [text for name in PATTERNS if isinstance(text := adapter.get(name), str)]
    for text in (*own, *(text for name in RANKED for text in adapter.get(name) or {})):
        for pattern in (f"(?:{text})$", rf"(?:.*\.)?(?:{text})$"):  # as peft looks for them
            try:
                matching("pattern", pattern, modules, whole=True)
            except OptionError:
                raise ValueError(f"{path} has the pattern {text}, which takes too long to match; refused") from None


def with_adapter(
    model: nn.Module, adapter: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path, *, merged: bool
) -> nn.Module:
    """The model with an adapter: in its weights if `merged`, else as parameters of its own, which alone are trainable.

    `adapter` is the content of `adapter_config.json`, `weights` are the adapter's tensors. peft builds and merges it;
    only the entries of `FIELDS` reach it, so that a configuration can name neither code nor files.

    Raises:
        ValueError: peft is not installed, the adapter is of another kind, or it does not fit the model.
    """
    kind = adapter.get("peft_type")
    if kind != "LORA":
        raise ValueError(
            f"{path} is an adapter of the kind {kind}, expected LORA; merge it yourself, and save the model"
        )
    other = [name for name, value in adapter.items() if value and name not in (*FIELDS, *WITHOUT_EFFECT)]
    if other:
        raise ValueError(
            f"{path} is an adapter with {other[0]}, which is not read here; merge it yourself, and save the model"
        )
    _check(path, adapter, weights, [name for name, _ in model.named_modules()])
    peft = library("peft")
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    given = {name: adapter[name] for name in FIELDS if adapter.get(name) is not None}
    held = sum(tensor.nbytes for tensor in weights.values())
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # its initial values are drawn, then replaced
        warnings.simplefilter("ignore")  # of the library's own use of transformers
        with counting(path, lambda count: refuse_expanding(path, "an adapter", count, held, SLACK)):
            wrapped = guarded(str(path), lambda: peft.get_peft_model(model, peft.LoraConfig(**given)))
    wanted = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    lacking, unknown = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    if lacking or unknown:
        which = f"the file has no {lacking[0]}" if lacking else f"the model has no place for {unknown[0]}"
        raise ValueError(f"the adapter {path} does not fit {type(model).__name__}: {which}; give its base with --model")
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"the adapter {path} does not fit {type(model).__name__}: {name} is {tuple(tensor.shape)} in the file "
                f"and {tuple(wanted[name].shape)} in the model; give its base with --model"
            )
    peft.set_peft_model_state_dict(wrapped, dict(weights))
    if not merged:
        return wrapped.get_base_model()  # type: ignore[no-any-return]
    whole: nn.Module = wrapped.merge_and_unload()
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(trainable.get(name, True))
    return whole

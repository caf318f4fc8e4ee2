"""Tensors in nested structures (tuples, lists, dicts, dataclasses, objects), and which go to the model or the loss."""

import copy
import inspect
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_convert

# A tensor, or a tuple, list, mapping or plain object of nested values; leaves other than tensors are left alone.
Nested: TypeAlias = Any
LEAVES = (bool, int, float, str, type(None), torch.dtype, torch.device, slice, type(Ellipsis))  # hold no tensor


def tensors_in(value: Nested) -> Iterator[Tensor]:
    """All tensors, in a fixed order: of an object those of its attributes."""
    if isinstance(value, Tensor):
        return iter((value,))
    if type(value) is tuple:  # arguments of a call, whose path needs no words
        items = (item for item in value if type(item) not in LEAVES)
        return itertools.chain.from_iterable(map(tensors_in, items))
    if type(value) is dict and not value:
        return iter(())
    return (tensor for _, tensor in named_tensors(value))


def named_tensors(value: Nested, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors with the path to each, such as `inputs.0.mask`."""
    return (
        (name, found.data if isinstance(found, PackedSequence) else found) for name, found in _leaves(value, prefix)
    )


def _leaves(
    value: Nested, prefix: str = "", inside: tuple[Nested, ...] = ()
) -> Iterator[tuple[str, Tensor | PackedSequence]]:
    """All tensors and packed sequences with the path to each; `inside` which objects the value is.

    An object that refers to one that it is in, is not entered again.
    """
    if isinstance(value, Tensor | PackedSequence):
        yield prefix, value
        return
    if any(value is outer for outer in inside):
        return
    for name, inner in _items(value):
        if type(inner) not in LEAVES:
            yield from _leaves(inner, f"{prefix}.{name}" if prefix else str(name), (*inside, value))


def map_tensors(value: Nested, change: Callable[[Tensor], Tensor], copies: dict[int, Nested] | None = None) -> Nested:
    """The same structure with a function applied to every tensor; objects are copied, never changed.

    `copies` are those made so far, by the id of the original, which may refer to itself.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        orders = (None if order is None else change(order) for order in (value.sorted_indices, value.unsorted_indices))
        return PackedSequence(change(value.data), value.batch_sizes, *orders)  # the sizes have to stay on the CPU
    if isinstance(value, tuple | list):
        items = [map_tensors(item, change, copies) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        inner = {key: map_tensors(item, change, copies) for key, item in value.items()}
        return type(value)(inner) if isinstance(value, dict) else inner
    if not _is_plain_object(value):
        return value
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    changed = copies[id(value)] = copy.copy(value)
    for name, item in vars(value).items():
        object.__setattr__(changed, name, map_tensors(item, change, copies))  # also of a frozen dataclass
    return changed


def as_tensors(value: Nested) -> Nested:
    """The same structure with tensors in place of NumPy's arrays."""
    return default_convert(value)  # type: ignore[no-untyped-call]


def common_length(value: Nested) -> int | None:
    """The length along dimension 0 that all tensors share; None if they share none, or there is no tensor.

    Packed sequences, of several lengths, have none.
    """
    lengths = {len(found) if isinstance(found, Tensor) and found.dim() else None for _, found in _leaves(value)}
    return lengths.pop() if len(lengths) == 1 else None


def rows_of(value: Nested, rows: slice | Tensor) -> Nested:
    """Some rows of every tensor; the tensors share a `common_length`."""
    return map_tensors(value, lambda tensor: tensor[rows])


def _items(value: Nested) -> Iterator[tuple[Any, Nested]]:
    if isinstance(value, tuple | list):
        yield from enumerate(value)
    elif isinstance(value, Mapping):
        yield from value.items()
    elif _is_plain_object(value):
        yield from vars(value).items()


def _is_plain_object(value: Any) -> bool:
    """Whether a value is a dataclass, or an instance of another class made in Python with a tensor as attribute."""
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return is_dataclass(value) or any(isinstance(inner, Tensor) for inner in vars(value).values())


# Keys of samples that are dicts, as transformers, datasets and torchvision name them; the first that exists counts.
INPUTS = ("pixel_values", "image", "img", "images", "input", "inputs", "x", "data")
TARGETS = ("labels", "label", "fine_label", "target", "targets", "y", "class")
WHOLE = ("batch", "data", "graph")  # names of a forward parameter that takes the whole batch
Forward = Callable[[Callable[..., Any], Nested], Any]  # (model, inputs) -> outputs


class PositionalInputs(tuple[Nested, ...]):
    """Inputs that a model is called with as positional arguments."""


class KeywordInputs(dict[str, Nested]):
    """Inputs that a model is called with as keyword arguments."""


def kind_of(inputs: Nested) -> str:
    """What the inputs of a mini-batch are, if they are not one tensor, in words."""
    if isinstance(inputs, Mapping):
        return f"the fields {', '.join(map(str, inputs))}"
    return f"{len(inputs)} inputs" if isinstance(inputs, tuple) else f"a {type(inputs).__name__}"


def call_model(model: Callable[..., Any], inputs: Nested) -> Any:
    """What a model returns for the inputs of a mini-batch: one argument, or several, positional or by name."""
    if isinstance(inputs, PositionalInputs):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, KeywordInputs) else model(inputs)


def input_named(model: Callable[..., Any], inputs: Nested, name: str) -> Nested:
    """The input of a model that has a name, given by it or by its position; None if there is none."""
    if isinstance(inputs, PositionalInputs):
        inputs = dict(zip(inspect.signature(getattr(model, "forward", model)).parameters, inputs, strict=False))
    return inputs.get(name) if isinstance(inputs, Mapping) else None


@dataclass(frozen=True)
class BatchLayout:
    """How a model is called and what the loss takes, which decides how a batch, or a sample, is read."""

    required: tuple[str, ...] = ("inputs",)  # parameters of the model's forward pass without a default, in order
    optional: tuple[str, ...] = ()  # those that may be left out and are None then
    keywords: bool = False  # forward takes any keyword
    called_by_loss: bool = False  # the loss calls the model, with whatever parts of the batch it likes

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> "BatchLayout":
        """From the signature of a model's forward pass; one without a signature takes one input."""
        try:
            parameters = inspect.signature(forward).parameters.values()
        except (TypeError, ValueError):
            return cls()
        given = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        required = tuple(p.name for p in given if p.default is p.empty)
        optional = tuple(p.name for p in parameters if p.default is None)
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return cls(required, optional, any_keyword) if required or optional else cls(keywords=any_keyword)

    def read(self, what: str, batch: Nested) -> tuple[Nested, Nested]:
        """Inputs and targets of a batch, or of a sample.

        Inputs are what the model is called with: a tensor, `PositionalInputs`, `KeywordInputs`, or another object as a
        whole. Without a recognisable target, the targets are the batch itself. Of a tuple whose entries are more than
        a one-input model and its loss need, such as (picture, class, index), the rest is ignored.

        Raises:
            ValueError: there are several ways to read it.
        """
        try:
            return self._parts(what, batch)
        except ValueError:
            if not self.called_by_loss:
                raise
            return batch, batch

    def _parts(self, what: str, batch: Nested) -> tuple[Nested, Nested]:
        if isinstance(batch, Mapping):
            return self._from_mapping(what, batch)
        if isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
            return self._from_tuple(what, tuple(batch))
        if isinstance(batch, Tensor | np.ndarray) or not hasattr(batch, "__dict__"):
            return batch, batch
        target = first_of(TARGETS, vars(batch))
        return batch, batch if target is None else getattr(batch, target)

    def _from_tuple(self, what: str, batch: tuple[Nested, ...]) -> tuple[Nested, Nested]:
        if len(batch) < 2:
            return (batch[0], batch[0]) if batch else (batch, batch)
        required, most = len(self.required), len(self.required) + len(self.optional)
        if len(self.required) == 1 and self.required[0] in WHOLE and len(batch) > 2:
            return batch, batch[-1]
        if len(batch) == 2 or most <= 1 or (required <= 1 and _is_labelled_picture(batch)):
            return self._inputs(batch[0]), batch[1]
        if required >= 2 and (len(batch) - 1 <= required or most == required):
            count = min(required, len(batch) - 1)
            return PositionalInputs(batch[:count]), batch[count]
        names = ", ".join((*self.required, *self.optional)[:4])
        raise ValueError(
            f"{what} has {len(batch)} entries and the model takes several inputs ({names}, ...), so it is not clear "
            f"which are inputs; give a dict with their names, or ((input, ...), target)"
        )

    def _inputs(self, value: Nested) -> Nested:
        """The first part of a pair, which may hold several inputs."""
        required, most = len(self.required), len(self.required) + len(self.optional)
        if isinstance(value, tuple | list) and not hasattr(value, "_fields") and required <= len(value) <= most > 1:
            return PositionalInputs(value)
        known = {*self.required, *self.optional}
        if isinstance(value, Mapping) and value and set(self.required) <= set(value):
            return KeywordInputs(value) if self.keywords or set(value) <= known else value
        return value

    def _from_mapping(self, what: str, batch: Mapping[Any, Nested]) -> tuple[Nested, Nested]:
        target = first_of(TARGETS, batch)
        rest = [name for name in batch if name != target]
        alone = batch[rest[0]] if len(rest) == 1 else batch
        targets = alone if target is None else batch[target]
        known = (*self.required, *self.optional)
        accepted = [name for name in rest if name in known]
        if accepted and set(self.required) <= set(accepted):
            named = KeywordInputs({name: batch[name] for name in accepted})
            return batch[accepted[0]] if accepted == [known[0]] else named, targets
        value = first_of(INPUTS, rest)
        if len(self.required) == 1 and self.required[0] in WHOLE:
            return batch, targets
        if value is not None:
            return batch[value], targets
        if self.keywords and not self.required:
            return KeywordInputs({name: batch[name] for name in rest}), targets
        if len(self.required) == 1:
            return alone, targets
        raise ValueError(
            f"{what} has the fields {', '.join(map(str, batch))} and the model takes {', '.join(known)}; "
            "name the fields like the model's inputs, or give a loss of (model, batch), which calls the model itself"
        )


def _is_labelled_picture(batch: tuple[Nested, ...]) -> bool:
    """Whether a tuple is a picture, or a batch of them, with one integer per picture in every other entry.

    An input that a model may do without, such as an attention mask, has more than one number per picture.
    """
    picture, *others = batch
    sides = len(getattr(picture, "shape", ()))  # (C, H, W), or (B, C, H, W)
    if sides == 4:
        return all(_is_integer(other, (len(picture),)) for other in others)
    return (sides == 3 or hasattr(picture, "getbands")) and all(_is_integer(other, ()) for other in others)


def _is_integer(value: Nested, shape: tuple[int, ...]) -> bool:
    if isinstance(value, Tensor):
        return value.shape == shape and not value.is_floating_point() and value.dtype != torch.bool
    return np.shape(value) == shape and np.asarray(value).dtype.kind in "iu"


def first_of(known: Iterable[str], there: Container[str]) -> str | None:
    """The first of the known names that is there, None if there is none."""
    return next((name for name in known if name in there), None)


def outputs_of(model: Callable[..., Any], inputs: Nested) -> Tensor:
    """Logits of a model; see `logits_in`."""
    return logits_in(call_model(model, inputs))


def logits_or_none(returned: object) -> Tensor | None:
    """As `logits_in`, None if there are none."""
    try:
        return logits_in(returned)
    except ValueError:
        return None


def logits_in(returned: object) -> Tensor:
    """Logits from what a model returns.

    A tensor is the logits. Otherwise they are the value named `logits` (entry of a dict, attribute of a dataclass or
    named tuple), or `out` (entry of a dict, (N, C, H, W), as of torchvision's segmentation networks), or
    `last_hidden_state` (entry of a dict, (N, C)), or without one the first tensor of a tuple or list.

    Raises:
        ValueError: there are none.
    """
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, Mapping):
        others = ((returned.get("out"), 4), (returned.get("last_hidden_state"), 2))
        several = (value for value, axes in others if isinstance(value, Tensor) and value.dim() == axes)
        named = returned["logits"] if returned.get("logits") is not None else next(several, None)
    else:
        named = getattr(returned, "logits", None)
    ordered = returned if isinstance(returned, tuple | list) else ()
    logits = next((value for value in (named, *ordered) if isinstance(value, Tensor)), None)
    if logits is None:
        raise ValueError(
            "the model returns no tensor and nothing named logits; wrap it so that it returns logits, or give a loss "
            "of what it returns with --loss file.py:function"
        )
    return logits

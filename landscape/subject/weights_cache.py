"""Cache values that are computed from a subject's weights, until the weights change."""

from collections.abc import Callable, Hashable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from landscape.subject.subject import Subject

P = ParamSpec("P")
T = TypeVar("T")


class WeightsCache:
    """The cache of one subject, filled by functions that are decorated with `once_per_weights`."""

    def __init__(self) -> None:
        self.values: dict[Hashable, Any] = {}
        self._weights = ""

    def discard_unless(self, weights: str) -> None:
        """Discard every value if it was derived from other weights than those of this SHA-256."""
        if self._weights not in ("", weights):
            self.values.clear()
        self._weights = weights


def cache_of(subject: Subject) -> WeightsCache:
    """The cache of a subject, which ends with it."""
    cache: WeightsCache = vars(subject).setdefault("_weights_cache", WeightsCache())
    return cache


def once_per_weights(function: Callable[Concatenate[Subject, P], T]) -> Callable[Concatenate[Subject, P], T]:
    """Cache a function of a subject for each set of arguments, until hashing finds that the weights have changed.

    Arguments are compared by value; a mapping of tensors by its names and the identity of its tensors.
    """

    @wraps(function)
    def cached(subject: Subject, /, *args: P.args, **kwargs: P.kwargs) -> T:
        named = tuple((name, _hashable(kwargs[name])) for name in sorted(kwargs))
        member = getattr(subject.forward, "current", None)  # the values of a member that runs alone are its own
        key = (function, tuple(map(_hashable, args)), named, member)
        values = cache_of(subject).values
        if key not in values:
            values[key] = (function(subject, *args, **kwargs), args, kwargs)  # the arguments' identities stay taken
        return values[key][0]  # type: ignore[no-any-return]

    return cached


def _hashable(argument: Any) -> Hashable:
    if isinstance(argument, Mapping):
        return tuple((name, id(tensor)) for name, tensor in argument.items())
    return argument  # type: ignore[no-any-return]

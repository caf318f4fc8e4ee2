"""The cache of a subject: what is computed once, and what discards it."""

from dataclasses import replace

import torch
from analytic import tanh_net

from landscape.subject.loading.identity import weights_sha256
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

CALLS: list[object] = []


@once_per_weights
def total(subject: Subject, power: int = 1, *, names: tuple[str, ...] = ()) -> float:
    CALLS.append((power, names))
    return sum(p.pow(power).sum().item() for p in subject.parameters.values())


@once_per_weights
def same_names(subject: Subject, tensors: dict[str, torch.Tensor]) -> list[str]:
    return list(tensors)


def test_a_function_runs_once_per_arguments_and_subject() -> None:
    CALLS.clear()
    subject = tanh_net()
    assert [total(subject), total(subject, 2), total(subject), total(subject, names=("a",))][0] == total(subject)
    assert CALLS == [(1, ()), (2, ()), (1, ("a",))]
    total(replace(subject))
    assert len(CALLS) == 4  # another subject has a cache of its own


def test_hashing_changed_weights_discards_what_was_derived() -> None:
    subject = tanh_net()
    before = weights_sha256(subject)
    first = total(subject)
    assert weights_sha256(subject) == before
    with torch.no_grad():
        next(iter(subject.parameters.values())).add_(1.0)
    assert total(subject) == first  # nobody has looked at the weights yet
    assert weights_sha256(subject) != before
    assert total(subject) != first


def test_tensors_are_compared_by_identity() -> None:
    subject, tensor = tanh_net(), torch.ones(2)
    found = same_names(subject, {"a": tensor})
    assert same_names(subject, {"a": tensor}) is found
    assert same_names(subject, {"a": tensor.clone()}) is not found

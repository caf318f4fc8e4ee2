"""The deterministic mode: its error for an operation without an algorithm, and what it restores."""

import pytest
import torch

from landscape.training.updates import deterministic_algorithms


def test_an_operation_without_a_deterministic_algorithm_is_named_in_one_line() -> None:
    with (
        pytest.raises(RuntimeError, match=r"^put_ has no deterministic algorithm .*--deterministic") as caught,
        deterministic_algorithms(),
    ):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert "\n" not in str(caught.value)
    assert not torch.are_deterministic_algorithms_enabled()


def test_other_errors_pass_and_everything_is_as_before() -> None:
    seen: list[bool] = []

    def fail() -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"), deterministic_algorithms():
        fail()
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()

"""Facts about the check of declared sizes: where its limit lies, and what its error says."""

import pytest

from landscape.results.declared_size import refuse_oversized


def test_the_limit_is_expansion_times_what_is_held_plus_the_slack() -> None:
    refuse_oversized("a.pt", "tensors", 100, 100)
    refuse_oversized("a.pt", "tensors", 1605, 100, expansion=16, slack=5)
    with pytest.raises(ValueError, match=r"^a\.pt declares tensors of 1,606 bytes in a file of 100 bytes; refused$"):
        refuse_oversized("a.pt", "tensors", 1606, 100, expansion=16, slack=5)
    with pytest.raises(ValueError, match="declares a vit_s of 101 numbers in a file of 100 numbers"):
        refuse_oversized("a.pt", "a vit_s", 101, 100, unit="numbers")

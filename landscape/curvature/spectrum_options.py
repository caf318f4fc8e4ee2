"""Check the options of a spectrum: ranges, choices, and which exclude each other."""

from collections.abc import Iterator
from typing import Any, Literal, get_args

from landscape.curvature.stopping import Which
from landscape.options import OptionError, at_least, one_of, regular_expression, require
from landscape.products.hvp_backends import Hvp, Kinks
from landscape.products.operator import Matrix

Scope = Literal["batch", "dataset"]
Engine = Literal["lanczos", "pyhessian"]
CHOICES = {"which": Which, "scope": Scope, "operator": Matrix, "hvp": Hvp, "kinks": Kinks, "engine": Engine}
LARGEST_RESULT = 2**30  # bytes of eigenvectors


def check(given: Any) -> None:
    """Check the options of the probe `hessian`.

    Raises:
        OptionError: one is out of its range, or two exclude each other.
    """
    at_least("top", given.top, 1)
    at_least("batches", given.batches, 0)
    at_least("max_products", given.max_products, 2)
    for name, choices in CHOICES.items():
        one_of(name, getattr(given, name), get_args(choices))
    for conflict in _conflicts(given):
        raise OptionError(conflict)
    regular_expression("params", given.params)
    require(0 < given.tol < 1, "tol", given.tol, "above 0 and below 1")
    require(0 <= given.tol_residual < 1, "tol-residual", given.tol_residual, "at least 0 and below 1")
    require(0 < given.ends <= 1, "ends", given.ends, "above 0 and at most 1")


def require_storable(size: int) -> None:
    """Check that eigenvectors of so many bytes fit a results file.

    Raises:
        ValueError: they do not.
    """
    if size > LARGEST_RESULT:
        raise ValueError(
            f"--eigenvectors would store {size / 2**30:.1f} GiB, at most 1 GiB fits a results file; "
            "use fewer --batches, a smaller --top, or one block of weights with --params"
        )


def _conflicts(given: Any) -> Iterator[str]:
    """What is wrong with combinations of options that exclude each other."""
    traced = given.hvp == "traced"
    if given.operator in ("ggn", "fisher") and traced:
        only = f"--hvp {given.hvp} makes products of the Hessian only"
        yield f"{only}; with --operator {given.operator} use auto or double-backward"
    beyond_pyhessian = {
        f"which {given.which}": given.which != "LM",
        f"operator {given.operator}": given.operator != "hessian",
        f"scope {given.scope}": given.scope != "batch",
        f"hvp {given.hvp}": traced,
        "per-layer": given.per_layer,
        "tol-residual": given.tol_residual != 0.0,
    }
    for option, wanted in beyond_pyhessian.items():
        if given.engine == "pyhessian" and wanted:
            yield f"--engine pyhessian does not support --{option}; leave one of them out"
    if given.operator == "preconditioned" and given.which == "SA":
        yield "--operator preconditioned compares the largest eigenvalue; use --which LA, LM or both"
    if given.operator != "preconditioned" and (given.optimizer or given.optimizer_arg or not given.optimizer_state):
        yield "options of the optimiser need --operator preconditioned; add it or leave them out"
    if given.per_layer and traced:
        yield f"--hvp {given.hvp} would trace every layer; with --per-layer use auto or double-backward"
    if given.per_layer and given.eigenvectors:
        yield "--per-layer cannot store --eigenvectors; select one layer with --params"

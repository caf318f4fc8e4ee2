"""The contract of a probe: what is checked when the table is loaded, and that all tables agree."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest

from landscape.plots import FIGURES
from landscape.probe import Plan, Probe, SharesPass, Values, checked
from landscape.probes import PROBES, probe_class


@dataclass(frozen=True)
class Complete(Probe):
    """A probe with one optional capability and a private helper."""

    name: ClassVar[str] = "complete"

    def plan(self, subject: Any) -> Plan:
        return Plan({}, {})

    def measure(self, subject: Any, unit: Any) -> Values:
        return self._nothing()

    def reduce(self, data: Any) -> Values:
        return {}

    def _nothing(self) -> Values:
        return {}


@pytest.mark.parametrize("name", PROBES)
def test_every_probe_keeps_the_contract_and_stands_in_every_table(name: str) -> None:
    kind = probe_class(name)
    assert kind.name == name
    assert issubclass(kind, SharesPass) == PROBES[name].shared_pass
    assert set(kind.smallest) <= {field.name for field in fields(kind)}
    assert name in {figure.probe for figure in FIGURES.values()}


def test_a_complete_probe_is_accepted_and_answers_what_it_has_no_option_for() -> None:
    assert checked(Complete) is Complete
    probe = Complete()
    assert (probe.seed, probe.params, probe.layers, probe.whole) == (None, "", None, True)
    hessian = probe_class("hessian")
    assert [hessian(scope=scope).whole for scope in ("batch", "dataset")] == [False, True]


METHODS = {key: vars(Complete)[key] for key in ("plan", "measure", "reduce")}


def made(name: str, base: type, **methods: Any) -> type[Any]:
    body = {"name": name.lower(), "__annotations__": {}, **methods}
    return dataclass(frozen=True)(type(name, (base,), body))


@pytest.mark.parametrize("name", ["plan", "measure"])
def test_a_probe_without_its_methods_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"Lacking lacks {name} of Probe"):
        checked(made("Lacking", Probe, **{key: METHODS[key] for key in ("plan", "measure") if key != name}))


@pytest.mark.parametrize(
    ("name", "method", "said"),
    [
        ("redcue", lambda self, data: {}, r"Odd\.redcue is not a method of a probe, .*; did you mean reduce\?"),
        ("stage", lambda self, arrays: None, r"Odd.stage takes \(self, arrays\), expected \(self, data\)"),
    ],
)
def test_a_misspelt_or_odd_method_is_refused(name: str, method: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        checked(made("Odd", Complete, **METHODS, **{name: method}))


@pytest.mark.parametrize(("name", "kind"), [("seed", int), ("params", str), ("whole", bool), ("batch_size", int)])
def test_a_parameter_without_a_default_does_not_take_that_of_the_contract(name: str, kind: type) -> None:
    with pytest.raises(TypeError, match=f"Own.{name} has no default of its own, and Probe has one"):
        checked(made("Own", Complete, **METHODS, __annotations__={name: kind}))


def test_what_is_no_frozen_dataclass_of_a_probe_is_refused() -> None:
    for kind in (dict, type("Plain", (Probe,), {"name": "plain"}), dataclass(type("Open", (Probe,), {"name": "open"}))):
        with pytest.raises(TypeError, match="expected a frozen dataclass that inherits Probe"):
            checked(kind)

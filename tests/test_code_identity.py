"""Functions and modules made in Python are identified by everything that they compute from."""

import ast
import gc
import importlib.util
import inspect
import linecache
import sys
import types
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.probes.variance import Variance
from landscape.running.run import digest
from landscape.subject.loading import code_identity
from landscape.subject.loading.code_identity import object_sha256
from landscape.subject.loading.load import load

FACTOR = 1.0


def of_global(x: Tensor) -> Tensor:
    return FACTOR * x


def by_another(x: Tensor) -> Tensor:
    return of_global(x)


def closing_over(value: Any) -> Callable[[Tensor], Tensor]:
    def multiplied(x: Tensor) -> Tensor:
        return value * x

    return multiplied


def with_keyword(value: float) -> Callable[..., Tensor]:
    def multiplied(x: Tensor, *, factor: float = value) -> Tensor:
        return factor * x

    return multiplied


def locally_defined(value: float) -> nn.Module:
    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return value * x

    return Local()


class Configured(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class Callback:
    def __init__(self, value: float) -> None:
        self.weight = torch.tensor(value)


def filled(value: float) -> nn.Module:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.fill_(value)
        module.bias.zero_()
    return module


def hooked(value: float) -> nn.Module:
    module = Configured()
    module.register_forward_hook((lambda m, x, y: 2 * y) if value > 1 else (lambda m, x, y: 3 * y))
    return module


PAIRS: dict[str, Callable[[float], Any]] = {
    "tensor in a closure": lambda v: closing_over(torch.tensor(v)),
    "array in a closure": lambda v: closing_over(np.array([v])),
    "module in a closure": lambda v: closing_over(filled(v)),
    "default of a keyword": with_keyword,
    "tensor in a partial function": lambda v: partial(F.cross_entropy, weight=torch.tensor([1.0, v])),
    "two functions on a line": lambda v: [lambda x: 2 * x, lambda x: 3 * x][int(v) - 1],
    "buffer of a loss": lambda v: nn.CrossEntropyLoss(weight=torch.tensor([1.0, v])),
    "tensor of a callable object": Callback,
    "partial function as an attribute": lambda v: Configured(act=partial(F.leaky_relu, negative_slope=v)),
    "closure as an attribute": lambda v: Configured(act=closing_over(v)),
    "configuration": lambda v: Configured(config=types.SimpleNamespace(inner=types.SimpleNamespace(scale=v))),
    "private attribute": lambda v: Configured(_scale=v),
    "tensor as an attribute": lambda v: Configured(scale=torch.tensor(v)),
    "modules in a list": lambda v: Configured(hidden=[filled(v)]),
    "data type": lambda v: Configured(kind=torch.float32 if v > 1 else torch.float64),
    "local class": locally_defined,
    "hook": hooked,
}


@pytest.mark.parametrize("case", PAIRS)
def test_other_values_are_another_identity(case: str) -> None:
    make = PAIRS[case]
    assert object_sha256(make(1.0)) == object_sha256(make(1.0))
    assert object_sha256(make(1.0)) != object_sha256(make(2.0))


def test_global_values_and_weights_count_only_where_they_are_used_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [object_sha256(function) for function in (of_global, by_another)]
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert all(object_sha256(now) != then for now, then in zip((of_global, by_another), before, strict=True))
    pair = [Configured(layer=filled(v)) for v in (1.0, 2.0)]
    with_weights, without = ([object_sha256(m, weights=w) for m in pair] for w in (True, False))
    assert with_weights[0] != with_weights[1]
    assert without[0] == without[1]


@pytest.mark.slow
def test_objects_that_refer_to_themselves_have_an_identity_and_nothing_is_kept_alive() -> None:
    one = types.SimpleNamespace(scale=1.0)
    one.itself = one
    assert len(object_sha256(Configured(config=one))) == 64
    module = filled(1.0)
    object_sha256(closing_over(module))
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_the_source_of_a_class_is_that_of_inspect_and_a_file_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, parse = list[str](), ast.parse
    monkeypatch.setattr(code_identity.ast, "parse", lambda text: parsed.append(text) or parse(text))
    code_identity._places.cache_clear()
    kinds = [
        kind for kind in vars(nn.modules.conv).values() if isinstance(kind, type) and kind.__module__[-4:] == "conv"
    ]
    ours = [code_identity._class_source(kind) for kind in (*kinds, Configured, Callback)]
    monkeypatch.undo()
    assert len(kinds) > 10
    assert ours == [inspect.getsource(kind) for kind in (*kinds, Configured, Callback)]
    assert len(parsed) == 2


def test_code_in_another_file_than_the_named_one_belongs_to_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(folder: Path, activation: str) -> list[str]:
        folder.mkdir(exist_ok=True)
        (folder / "mine.py").write_text(
            "import torch\nfrom parts_of_mine import make, weigh\n\ndef model():\n    torch.manual_seed(0)\n"
            "    return make()\n\ndef data():\n    return torch.ones(6, 3), torch.arange(6) % 2\n\n"
            "def loss(outputs, targets):\n    return weigh(outputs, targets)\n"
        )
        (folder / "parts_of_mine.py").write_text(
            "from torch import nn\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.head = nn.Linear(3, 2)\n    def forward(self, x):\n"
            f"        return self.head(x).{activation}()\n\n"
            "def make():\n    return Net()\n\ndef weigh(outputs, targets):\n"
            f"    return nn.functional.cross_entropy(outputs.{activation}(), targets, reduction='none')\n"
        )
        for name in [name for name in sys.modules if name == "parts_of_mine" or name.startswith("_landscape_mine")]:
            monkeypatch.delitem(sys.modules, name)
        mine = folder / "mine.py"
        linecache.clearcache()
        subjects = (load(model=f"{mine}:model", data=f"{mine}:data", loss=loss) for loss in ("", f"{mine}:loss"))
        return [digest(Variance(), subject) for subject in subjects]

    first, again = measured(tmp_path / "a", "tanh"), measured(tmp_path / "b", "tanh")
    other = measured(tmp_path / "a", "sin")
    assert first == again  # the path does not matter
    assert len({*first, *other}) == 4


def test_code_that_was_replaced_after_its_import_is_not_what_is_there_now(tmp_path: Path) -> None:
    """As of a file beside the one that an option names: the next run would find numbers of code that is gone."""
    path = tmp_path / "layers.py"

    def imported(activation: str) -> types.ModuleType:
        text = "from torch import nn\nclass Act(nn.Module):\n    def forward(self, x):\n"
        path.write_text(f"{text}        return x.{activation}() if x.device.type in {{'cpu', 'cuda', 'mps'}} else x\n")
        spec = importlib.util.spec_from_file_location("layers", path)
        assert spec is not None and spec.loader is not None  # noqa: PT018
        module = sys.modules["layers"] = importlib.util.module_from_spec(spec)
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
        return module

    try:
        gone, there = imported("relu"), imported("tanh")
        digests = [object_sha256(module.Act()) for module in (gone, there, imported("tanh"))]
    finally:
        del sys.modules["layers"]
    assert digests[0] != digests[1] == digests[2]

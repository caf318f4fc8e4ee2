"""Callables of files and modules: what they may return, and how they are found."""

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from landscape.checkpoints.user_code import guarded, import_callable, refuse_file_alone, spec_sha256
from landscape.data import Batches, load
from landscape.data.sampling import balanced


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Writes a file and returns its path, for `path:callable`."""

    def write(text: str) -> str:
        path = tmp_path / "my:data.py"  # the last colon counts
        path.write_text(text)
        return str(path)

    return write


PAIR = """
import torch
from neighbour import COUNT
def pair():
    return torch.arange(2.0 * COUNT, dtype=torch.float64).view(COUNT, 2), torch.arange(COUNT) % 3
"""


def test_a_pair_is_used_as_it_is(script: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("COUNT = 7\n")
    spec = f"{script(PAIR)}:pair"
    images = load(spec, samples=5, mean=(0.5,), std=(0.5,))
    assert images.inputs.dtype == torch.float64
    assert torch.equal(images.inputs, torch.arange(10.0, dtype=torch.float64).view(5, 2))
    assert images.targets.tolist() == [0, 1, 2, 0, 1]
    assert (images.classes, images.size, images.mean, images.name) == (3, 0, (), spec)
    assert torch.equal(Batches(images, 2)[2][0], images.inputs[4:])


DATASET = """
from PIL import Image
import numpy as np, torch
from torch.utils.data import TensorDataset
READ = []
class Pictures:
    classes = ["x", "y", "z"]
    def __len__(self): return 6
    def __getitem__(self, i):
        READ.append(i)
        return Image.new("RGB", (4, 4), (i, i, i)), i % 2
class Listed(Pictures):
    targets = [0, 1, 0, 1, 0, 1]
def read(): return READ
def floats(): return TensorDataset(torch.arange(6.0).view(6, 1, 1, 1), torch.tensor([0, 0, 0, 0, 1, 1]))
def ragged(): return [(torch.zeros(1, 2, 2), 0), (torch.zeros(1, 3, 3), 1)]
def empty(): return []
def words(): return {"a": 1}
def failing(): raise RuntimeError("no disk\\nsecond line")
def mapped():
    values = np.ones((2, 3), np.float32)
    values.flags.writeable = False
    return values, np.array([0, 1])
def uneven(): return torch.zeros(3, 1), torch.zeros(2)
"""


def test_a_dataset_is_read_once_in_order_and_served_balanced(script: Callable[[str], str]) -> None:
    path = script(DATASET)
    images = load(f"{path}:Pictures")
    order = balanced(np.arange(6) % 2)
    assert import_callable(f"{path}:read")() == [*range(6), *range(4)]  # the first again: are they the same?
    assert images.inputs[:, 0, 0, 0].tolist() == order.tolist()
    assert images.targets.tolist() == (order % 2).tolist()
    assert (images.classes, images.size, images.inputs.dtype) == (3, 4, torch.uint8)
    assert images.mean == (0.485, 0.456, 0.406)
    listed = load(f"{path}:Listed", samples=3)  # it lists its targets: balanced, and only the chosen are read
    assert import_callable(f"{path}:read")()[-6:] == 2 * order[:3].tolist()
    assert listed.targets.tolist() == (order[:3] % 2).tolist()
    already = len(import_callable(f"{path}:read")())
    drawn = load(f"{path}:Pictures", samples=3)  # it does not: three items drawn at random, read twice as always
    assert len(import_callable(f"{path}:read")()) - already == 6
    assert len(set(drawn.inputs[:, 0, 0, 0].tolist())) == 3
    floats = load(f"{path}:floats", samples=4)
    assert floats.targets.bincount().tolist() == [2, 2]
    assert floats.mean == ()
    assert load(f"{path}:mapped").inputs.tolist() == [[1.0] * 3] * 2


SPLITS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

PARTS = {"train": torch.zeros(12, 3), "test": torch.ones(8, 3)}

def pair(split="train"): return PARTS[split], torch.arange(len(PARTS[split])) % 4
def keyword(*, split): return pair(split)
class Items(TensorDataset):
    def __init__(self, root="data", split="train"): super().__init__(*pair(split))
def loader(split): return DataLoader(Items(split=split), 4)
def whole(): return pair()
def anything(**options): return pair(**options)
def needs(root, split): return pair(split)
"""


@pytest.mark.parametrize("callable_name", ["pair", "keyword", "Items", "loader", "whole", "anything"])
def test_a_callable_that_takes_a_split_gets_it_and_another_is_one_part(
    callable_name: str, script: Callable[[str], str]
) -> None:
    name = f"{script(SPLITS)}:{callable_name}"
    parts = [load(name, split=split) for split in ("train", "test")]
    found = [(len(part), part.inputs.unique().tolist(), part.one_part) for part in parts]
    assert (
        found == [(12, [0], True)] * 2
        if callable_name in ("whole", "anything")
        else [(12, [0], False), (8, [1], False)]
    )


def test_specs_name_callables_of_files_and_modules(script: Callable[[str], str], tmp_path: Path) -> None:
    assert import_callable("collections:OrderedDict") is __import__("collections").OrderedDict
    path = script("def f(): return 1\n")
    first, digest = import_callable(f"{path}:f"), spec_sha256(f"{path}:f")
    assert digest == hashlib.sha256(b"def f(): return 1\n").hexdigest()
    assert import_callable(f"{path}:f") is first
    script("def f(): return 2\n")
    assert spec_sha256(f"{path}:f") == digest  # of what was run
    assert import_callable(f"{path}:f")() == 2  # an edited file is loaded anew
    assert spec_sha256(f"{path}:f") != digest
    assert spec_sha256("collections:OrderedDict") is None


def test_a_file_may_import_its_neighbours_when_its_functions_run(tmp_path: Path) -> None:
    (tmp_path / "neighbour_inside.py").write_text("VALUE = 5\n")
    (tmp_path / "mine.py").write_text("def f():\n    from neighbour_inside import VALUE\n    return VALUE\n")
    before = list(sys.path)
    assert import_callable(f"{tmp_path}/mine.py:f")() == 5
    assert sys.path == before  # another file named as its neighbour is not found elsewhere


def test_a_file_without_a_callable_names_those_it_defines_and_does_not_run(tmp_path: Path) -> None:
    (path := tmp_path / "mine.py").write_text("1 / 0\nclass Net: ...\ndef my_data(): ...\ndef _hidden(): ...\n")
    for value in (str(path), f"{path}:"):
        with pytest.raises(ValueError, match=r"it defines Net, my_data: give --data .*mine\.py:my_data"):
            refuse_file_alone("data", value)
    with pytest.raises(ValueError, match=r"it defines Net, my_data: give --loss .*mine\.py:NAME"):
        refuse_file_alone("loss", str(path))
    path.write_text("x = 1")
    with pytest.raises(ValueError, match="it defines no function or class"):
        refuse_file_alone("data", str(path))
    path.write_text("def f(:")
    with pytest.raises(ValueError, match="not readable as Python"):
        refuse_file_alone("data", str(path))
    with pytest.raises(FileNotFoundError, match=r"--data none\.py: there is no file none\.py"):
        load("none.py")
    refuse_file_alone("data", "digits")


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("nowhere/file.py:f", FileNotFoundError, "no file nowhere/file.py"),
        ("no_such_module:f", ValueError, "No module named 'no_such_module'"),
        ("collections:", ValueError, "names no callable"),
        (":f", ValueError, "names no callable"),
        ("def f(:", ValueError, "failed with SyntaxError"),  # the content of a file
        ("import no_such_module", ValueError, "failed with ModuleNotFoundError"),
        ("raise SystemExit(2)", ValueError, "failed with SystemExit"),
    ],
)
def test_a_spec_that_leads_nowhere_and_a_file_that_does_not_import_are_explained(
    spec: str, error: type[Exception], message: str, script: Callable[[str], str]
) -> None:
    with pytest.raises(error, match=message):
        import_callable(f"{script(spec)}:f" if "failed" in message else spec)


RANDOM = """
import random
import numpy as np
import torch
from torch.utils.data import DataLoader

class Drawn:
    def __init__(self, draw): self.draw = draw
    def __len__(self): return 12
    def __getitem__(self, i): return torch.full((2,), float(i)) + self.draw(), i % 3

OWN = np.random.default_rng(0)
def flipping(): return Drawn(lambda: float(torch.rand(())))
def numpys(): return Drawn(lambda: float(np.random.rand()))
def pythons(): return Drawn(random.random)
def own(): return Drawn(lambda: OWN.random())
def plain(): return Drawn(lambda: 0.0)
def pair(): return torch.randn(12, 2), torch.arange(12) % 3
def shuffled(): return DataLoader(plain(), batch_size=5, shuffle=True, drop_last=True)
def both(): return DataLoader(flipping(), batch_size=5, shuffle=True)
"""


@pytest.mark.parametrize(
    ("source", "callable_name", "message"),
    [
        (DATASET, "ragged", r"item 1 has the shapes \(\(1, 3, 3\), \(\)\)"),
        (DATASET, "empty", "empty list"),
        (DATASET, "words", "returned a dict; expected a torch Dataset"),
        (DATASET, "failing", "failed with RuntimeError: no disk$"),
        (DATASET, "uneven", r"inputs \(3, 1\) and targets \(2,\)"),
        (DATASET, "fail", "no callable 'fail'; it has failing"),
        (DATASET, "READ", "no callable 'READ'"),
        (SPLITS, "needs", "needs needs the argument root, but --data calls it without arguments, or"),
        (RANDOM, "own", r"own: item \d+ differs when it is read again.*switch its random"),
    ],
)
def test_a_callable_that_gives_no_data_is_explained(
    source: str, callable_name: str, message: str, script: Callable[[str], str]
) -> None:
    with pytest.raises(ValueError, match=message):
        load(f"{script(source)}:{callable_name}")


@pytest.mark.parametrize("name", ["flipping", "numpys", "pythons"])
def test_random_transforms_are_drawn_once_and_alike_in_every_process(
    name: str, script: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    path = script(RANDOM)
    before = torch.get_rng_state()
    first = load(f"{path}:{name}")
    assert "transforms its items at random; each was drawn once, with a fixed seed" in caplog.text
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    random.seed(7)
    again = load(f"{path}:{name}")
    assert torch.equal(first.inputs, again.inputs)
    offsets = first.inputs[:, 0] - first.inputs[:, 0].floor()
    assert len(set(offsets.tolist())) == 12  # every item its own draw
    caplog.clear()
    assert load(f"{path}:plain").sha256 != first.sha256
    assert not caplog.text  # of data without randomness


@pytest.mark.parametrize("name", ["pair", "shuffled", "both"])
def test_random_pairs_and_shuffling_loaders_give_the_same_samples_at_every_loading(
    name: str, script: Callable[[str], str]
) -> None:
    path = script(RANDOM)
    first = load(f"{path}:{name}")
    torch.manual_seed(7)
    assert first.sha256 == load(f"{path}:{name}").sha256


def test_weights_that_hold_code_are_refused_without_the_advice_of_torch(tmp_path: Path) -> None:
    torch.save({"weight": Path}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="its weights hold code, which is not run; save them with safetensors") as said:
        guarded("hf:net", lambda: torch.load(tmp_path / "pytorch_model.bin", weights_only=True))
    assert "weights_only" not in str(said.value)

"""`--layers` on the command line and in a file, and as messages advise it."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from analytic import attention_net, passage, run_probe
from foreign import Encoder, Functional
from torch import Tensor, nn

from landscape.discovery.discover import discover
from landscape.discovery.layer import Tap
from landscape.layers.layer_patterns import Pattern, expand, parse
from landscape.layers.selection import remarks, select_layers, unmeasured
from landscape.options import OptionError
from landscape.probes import probe_class
from landscape.probes.lesion import Lesion
from landscape.probes.variance import Variance
from landscape.subject.subject import Subject


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("blocks", Pattern("blocks")),
        ("blocks:mlp", Pattern("blocks", "mlp")),
        ("(?:a|b)", Pattern("(?:a|b)")),
        ("(?:a|b):conv", Pattern("(?:a|b)", "conv")),
        ("blocks:stream:2x4+1", Pattern("blocks", "stream", (2, 4), 1)),
        ("blocks:no_kind", Pattern("blocks:no_kind")),
        ("blocks:msa:14x12", Pattern("blocks", "msa", (14, 12))),
        ("blocks:msa:14x12+2", Pattern("blocks", "msa", (14, 12), 2)),
        ("blocks:7x7+1", Pattern("blocks", "", (7, 7), 1)),
        ("blocks::7x7+1", Pattern("blocks", "", (7, 7), 1)),
    ],
)
def test_an_entry_is_parsed_and_printed(text: str, expected: Pattern) -> None:
    assert parse(text) == expected
    assert parse(str(expected)) == expected


def test_a_file_expands_to_its_entries_in_order(tmp_path: Path) -> None:
    file = tmp_path / "layers.toml"
    file.write_text(
        "[layers]\n'^maps$' = \"\"\n'pool(ed)?$' = \"subsample\"\n'tokens' = \"msa:4x8+3\"\n'rows' = \"2x4\"\n"
    )
    patterns = ("head", str(file))
    assert expand(patterns) == ("head", "^maps$", "pool(ed)?$:subsample", "tokens:msa:4x8+3", "rows:2x4")
    # the run key does not name the file
    for name in ("variance", "fourier", "attention", "similarity", "probe-linear"):
        kind = probe_class(name)
        assert kind(layers=patterns) == kind(layers=expand(patterns)) != kind(layers=patterns[:1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[layers", "is not a TOML file"),
        ("a" + ".a" * 100_000 + " = 1", "has 200,005 bytes, expected at most 65,536"),
        ("", r"has no table \[layers\]"),
        ("layers = 3", r"has no table \[layers\]"),
        ("[layers]\na = 3", "expected KIND"),
        ("[layers]\na = { kind = 'msa' }", "expected KIND"),
        ("[layers]\na = 'attention'", "'attention', expected KIND.*; kinds are stem, conv"),
        ("[layers]\na = '4'", "expected KIND"),
        ("[layers]\na = '0x4'", "grid without positions"),
        ("[layers]\na = 'msa:4x4+-1'", "expected KIND"),
        ("[layers]\n'(' = 'msa'", "not a regular expression"),
    ],
)
def test_a_file_with_other_content_is_an_error(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "layers.toml"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"--layers .*{message}"):
        expand([str(file)])


def test_a_missing_file_and_a_grid_without_positions_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give a TOML file"):
        expand([str(tmp_path / "gone.toml")])
    with pytest.raises(OptionError, match="without positions"):
        parse("a:msa:0x4")


def test_tokens_get_the_grid_of_the_pattern() -> None:
    torch.manual_seed(0)
    model, images = Encoder(prefix=1).eval(), torch.randn(2, 3, 16, 8)
    (layer,) = select_layers(model, images, ["encoder.layers.0$:msa:2x4+1"])
    assert (layer.kind, layer.grid, layer.prefix) == ("msa", (2, 4), 1)  # found: 4 x 2
    assert (layer.attention.grid, layer.attention.prefix) == ((2, 4), 1)
    with pytest.raises(ValueError, match=r"means 17 tokens, but encoder\.layers\.0 returns 9 x 12"):
        select_layers(model, images, ["encoder.layers.0$:msa:4x4+1"])


def test_maps_on_a_given_grid_are_measured() -> None:
    maps = torch.randn(6, 2, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = run_probe(Variance(layers=("tokens:other:4x6+3",)), passage(maps))
    expected = maps.flatten(2).var(dim=2).mean(dim=1).mean()
    assert found["variance"][0] == pytest.approx(expected.item())


def test_a_name_stands_for_the_stream_or_for_the_branch_and_the_difference_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Variance after a self-attention: of the stream as discovered, of the branch when its module is named."""
    torch.manual_seed(0)
    subject = attention_net()
    found = run_probe(Variance(), subject)
    names = [layer.name for layer in select_layers(subject.model, subject.example()[0], [])]
    at = names.index("blocks.0.attention")
    stream, name = found["variance"][at], "^blocks.0.attention$"
    assert "note" not in caplog.text
    (branch,) = run_probe(Variance(layers=(name,)), subject)["variance"]
    assert abs(branch / stream - 1) > 0.1
    assert "--layers measures the output of blocks.0.attention itself, a branch" in caplog.text
    caplog.clear()
    for pattern in (f"{name}:stream", f"{name}:stream:2x2+1"):
        (again,) = run_probe(Variance(layers=(pattern,)), subject)["variance"]
        assert again == stream
    assert "note" not in caplog.text
    with pytest.raises(ValueError, match=r"means 3 tokens, but blocks.0.attention returns 5 x 6"):
        run_probe(Variance(layers=(f"{name}:stream:1x2+1",)), subject)
    with pytest.raises(ValueError, match=r"blocks.0.attention.qkv names no layer of the residual stream"):
        run_probe(Variance(layers=("qkv:stream",)), subject)


# What the tool advises


class Pooled(nn.Module):
    """An encoder whose nine latent tokens no grid explains, and an attention that pools them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.latent = nn.Conv2d(3, 6, 4, 4), nn.Linear(16, 9)
        self.mlp = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))
        self.pool = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.latent(self.embed(images).flatten(2)).transpose(1, 2)
        x = x + self.mlp(x)
        return self.head((x * self.pool(x).softmax(dim=1)).sum(dim=1))


def _advised(said: str) -> tuple[str, ...]:
    """The values of `--layers` that a message names."""
    words = shlex.split(said[said.index("--layers") :].partition(";")[0])
    assert set(words[::2]) == {"--layers"}
    return tuple(words[1::2])


def test_what_is_advised_for_parts_that_are_not_understood_can_be_pasted() -> None:
    model, images = Pooled().eval(), torch.randn(3, 3, 16, 16)
    layers = discover(model, images)
    assert [layer.name for layer in layers if layer.grid_unknown] == ["embed", "mlp"]
    (unknown,) = remarks(layers)
    assert "no grid of this model explains the 9 tokens of embed (2 layers)" in unknown
    found = select_layers(model, images, _advised(unknown))
    assert [(x.name, x.tap, x.grid) for x in found] == [(x.name, x.tap, (3, 3)) for x in layers]
    (beyond,) = unmeasured(model, images, layers)
    assert beyond.startswith("no layer depends on pool (2 weights)")
    found = select_layers(model, images, _advised(beyond))
    assert [(layer.name, layer.tap) for layer in found] == [
        *((layer.name, layer.tap) for layer in layers), ("pool", Tap("pool", "output"))
    ]  # fmt: skip


def test_a_lesion_takes_the_layers_that_its_refusal_of_several_networks_advises() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(Functional() for _ in range(2))

        def forward(self, images: Tensor) -> Tensor:
            return torch.stack([member(images) for member in self.members]).mean(dim=0)

    subject = Subject(Two().eval(), [(torch.randn(3, 3, 16, 16), torch.arange(3))])
    with pytest.raises(ValueError, match="2 networks side by side") as refusal:
        run_probe(Lesion(), subject)
    found = run_probe(Lesion(layers=_advised(str(refusal.value))), subject)
    assert found["name"].tolist() == ["members.0.branch"]
    assert np.isfinite(found["loss_increase"]).all()
    scores = nn.Sequential(nn.Flatten(), nn.Linear(768, 5)).eval()
    with pytest.raises(ValueError, match="no unit of this network can be removed") as refusal:
        run_probe(Lesion(), Subject(scores, subject.batches))
    assert "--layers" not in str(refusal.value)

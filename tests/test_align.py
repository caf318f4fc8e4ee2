"""The probes align and barriers: planted permutations, aligned checkpoints as files, matrices of barriers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
import torch
import xarray as xr
from analytic import batches_of, run_probe, same_state, state
from command_line import Command
from torch import Tensor

from landscape import models
from landscape.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from landscape.probes.align import Align, alignment_of
from landscape.probes.barriers import Barriers
from landscape.probes.line import Line
from landscape.results import reader
from landscape.results.headline_numbers import measured
from landscape.statistics.means import error_over_parts
from landscape.subject.sample_statistics import per_sample
from landscape.subject.subject import Subject
from landscape.symmetry.networks import recorded, tensors_of
from landscape.weight_space.barriers import with_weights

pytestmark = pytest.mark.slow

ARGUMENTS = {"classes": 10, "image_size": 8, "blocks": (1, 1), "width": 8}


def resnet(seed: int = 0) -> Subject:
    """With weights far from zero and statistics of batch norm away from their initial ones."""
    torch.manual_seed(seed)
    model = models.build("resnet_demo", **ARGUMENTS)
    batches = [(inputs.float(), targets) for inputs, targets in batches_of((3, 8, 8), (8, 8), 10)]
    with torch.no_grad():
        for _ in range(20):
            model(batches[0][0] + seed)
        for p in model.parameters():
            p += 0.2 * torch.rand_like(p)
    return Subject(model.eval(), batches)


def permuted(subject: Subject, seed: int = 1) -> dict[str, Tensor]:
    """The weights with all groups of units permuted at random."""
    inputs = subject.batch(0)[0]
    permutations, _ = recorded(subject.model, lambda m: m(inputs), inputs)
    moved = permutations.random(np.random.default_rng(seed))
    tensors = {name: tensor.detach() for name, tensor in tensors_of(subject.model).items()}
    return {**state(subject.model), **permutations.apply(tensors, moved)}


def saved(path: Path, weights: dict[str, Tensor]) -> str:
    torch.save(weights, path)
    return str(path)


def test_the_excess_of_a_permutation_alone_vanishes(tmp_path: Path) -> None:
    subject = resnet()
    found = run_probe(Align(against=saved(tmp_path / "b.pt", permuted(subject)), resolution=3), subject)
    assert found["name"].tolist()[::2] == ["as they are", "aligned"]
    assert np.abs(found["excess"][0]).max() > 0.05  # of an untrained network the loss may also fall
    np.testing.assert_allclose(found["loss"][2], found["loss"][2, 0], rtol=1e-5)
    np.testing.assert_allclose(found["excess"][2:], 0.0, atol=1e-5)
    assert found["group_moved"].max() > 0.5


def test_the_aligned_network_has_the_same_outputs_and_the_line_without_alignment_is_that_of_line(
    tmp_path: Path,
) -> None:
    subject, other = resnet(), resnet(1)
    path = saved(tmp_path / "b.pt", state(other.model))
    probe, before = Align(against=path, resolution=5, repair=0), state(subject.model)
    found = run_probe(probe, subject)
    assert same_state(subject.model, before)
    line = run_probe(Line(along=path, resolution=5), subject)
    for name in ("loss", "loss_se", "excess", "excess_se", "accuracy"):
        np.testing.assert_allclose(found[name][0], line[name][0], rtol=1e-12)
    for name in ("barrier", "barrier_se", "barrier_at"):
        assert found[name][0] == line[name][0]
    aligned = alignment_of(probe, subject)
    assert aligned.match.similarity > aligned.match.before
    model = resnet().model
    model.load_state_dict(dict(aligned.state))
    np.testing.assert_allclose(per_sample(replace(subject, model=model))[0], per_sample(other)[0], rtol=1e-4)
    np.testing.assert_allclose(found["loss"][1, -1], per_sample(other)[0].mean(), rtol=1e-4)


def test_the_matrix_of_barriers_holds_the_barrier_of_every_line(tmp_path: Path) -> None:
    subject = resnet()
    others = [saved(tmp_path / f"{seed}.pt", state(resnet(seed).model)) for seed in (1, 2)]
    probe = Barriers(members=",".join(others), resolution=3, repair=0)
    found = run_probe(probe, subject)
    matrix = found["barrier_matrix"][0]
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(np.diag(matrix), 0.0)
    between = run_probe(Line(along=others[1], resolution=3), with_weights(subject, others[0]))
    np.testing.assert_allclose(matrix[1, 2], between["barrier"][0], rtol=1e-6)
    np.testing.assert_allclose(found["barrier_matrix_se"][0][2, 1], between["barrier_se"][0], rtol=1e-6)
    np.testing.assert_allclose(error_over_parts(found["barrier_part"]), found["barrier_se"])
    with pytest.raises(ValueError, match="between at least 2 checkpoints, got 1"):
        Barriers().plan(subject)


def test_the_error_of_a_mean_barrier_knows_what_its_lines_have_in_common() -> None:
    """Two barriers whose samples err together, or against each other; without parts their errors count in full."""
    barriers, errors = np.array([[4.0, 6.0]]), np.array([[0.1, 0.3]])
    values = {"barrier": (("curve", "pair"), barriers), "barrier_se": (("curve", "pair"), errors)}
    draws = np.random.default_rng(0).normal(size=16)
    draws = 4 * (draws - draws.mean()) / draws.std(ddof=1)
    for signs, error in (([1, 1], 0.2), ([1, -1], 0.1), (None, 0.2)):
        parts = barriers[..., None] + np.multiply.outer(errors * (signs or 1), draws)
        known = {"barrier_part": (("curve", "pair", "part"), parts)} if signs else {}
        data = xr.Dataset(values | known, attrs=synthetic.declared("barriers"))
        (mean,) = (one for one in measured(data) if one.name == "mean")
        assert mean.error == pytest.approx(error)
        assert mean.known == bool(signs)  # of a mean over 16 parts by Student's t


def test_the_mean_barrier_before_is_that_of_other_permutations_not_of_other_statistics() -> None:
    def told(curves: int, **facts: int) -> Any:
        barriers = np.array([[4.0, 6.0], [0.2, 0.4], [3.0, 5.0], [0.1, 0.2]])[:curves]
        values = {"barrier": (("curve", "pair"), barriers), "barrier_se": (("curve", "pair"), 0.1 * barriers)}
        found = measured(xr.Dataset(values, attrs=synthetic.declared("barriers", **facts)))
        return {one.name: one.value for one in found}.get("mean before")

    assert told(2) is None
    assert told(2, before=0) == pytest.approx(5.0)
    assert told(4, before=1) == pytest.approx(0.3)


def test_the_command_writes_the_aligned_checkpoint(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    subject = resnet()
    for name, weights in (("a", state(subject.model)), ("b", permuted(subject))):
        write_checkpoint(
            Path(f"{name}.pt"), model="resnet_demo", model_args=ARGUMENTS, state_dict=weights,
            data={"name": "digits", "classes": 10, "size": 8, "mean": (0.5,) * 3, "std": (0.5,) * 3}, recipe={},
            epoch=2.0, metrics={"accuracy": 0.5}, seed=3,
        )  # fmt: skip
    options = ("--data", "digits", "--image-size", "8", "--samples", "16", "--resolution", "2", "--restarts", "1")
    code, _, err = command("align", "a.pt", "b.pt", "--save", "c.pt", *options)
    assert code == 0, err
    written, first, second = (read_checkpoint(Path(f"{name}.pt")) for name in "cab")
    assert all(torch.equal(written.state_dict[name], tensor) for name, tensor in first.state_dict.items())
    assert (written.model, written.epoch, written.seed) == (second.model, second.epoch, second.seed)
    ((_, data),) = reader.find(tmp_path / "results.h5", "align")
    assert data.attrs["proof_error"] <= 1e-5
    assert data.attrs["other"] == "b"
    code, _, err = command("align", "a.pt", "b.pt", "--save", ".", *options)
    assert (code, "--save must be a file, got the folder ." in err) == (2, True)
    code, _, err = command("align", "a.pt", "b.pt", "--save", "c.pt", "--adapter", "separate", *options)
    assert (code, "--save writes a whole network; drop --adapter separate" in err) == (2, True)
    code, _, err = command("align", "a.pt", "b.pt", "c.pt", *options)
    assert code == 2
    assert "align takes two checkpoints, got 3" in err


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    subject = resnet()
    broken = permuted(subject)
    broken["fc.weight"][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"b.pt has weights that are not finite \(fc.weight\)"):
        Align(against=saved(tmp_path / "b.pt", broken)).plan(subject)

"""The moving average of the weights: its recursion, its buffers, its checkpoint."""

from pathlib import Path

import pytest
import torch
from torch import nn

from landscape.checkpoints.checkpoint import read_checkpoint
from landscape.checkpoints.snapshots import of_run
from landscape.data.recipes import recipe
from landscape.predictions.evaluation import evaluate
from landscape.subject.loading.load import model_without_data
from landscape.subject.spec import Spec
from landscape.training.train import train
from landscape.training.training_set import splits
from landscape.training.updates import moving_average


def test_the_average_is_its_recursion() -> None:
    """a_t = d_t a + (1 - d_t) w_t with d_t = min(decay, (1 + t) / (10 + t)), written out for a scalar."""
    network = nn.Linear(1, 1, bias=False).double()
    values = [2.0, -1.0, 0.5, 8.0]
    with torch.no_grad():
        network.weight.fill_(3.0)
        average = moving_average(network, 0.3)
        expected = 3.0
        for t, value in enumerate(values, start=1):
            network.weight.fill_(value)
            average.update_parameters(network)
            decay = min(0.3, (1 + t) / (10 + t))
            expected = decay * expected + (1 - decay) * value
    assert [(1 + t) / (10 + t) < 0.3 for t in (1, 2, 3, 4)] == [True, True, False, False]  # both sides of the bound
    assert average.module.weight.item() == pytest.approx(expected, rel=1e-12)


def test_statistics_are_averaged_and_counters_copied() -> None:
    network = nn.BatchNorm2d(2)
    average = moving_average(network, 0.9)
    network(torch.full((4, 2, 1, 1), 10.0))
    average.update_parameters(network)
    assert average.module.num_batches_tracked == 1
    decay = 2 / 11
    assert average.module.running_mean.tolist() == pytest.approx([(1 - decay) * 0.1 * 10] * 2)
    assert network.running_mean.tolist() == pytest.approx([1.0] * 2)  # the network's own are its own


@pytest.mark.slow
def test_no_decay_gives_the_last_weights_and_does_not_change_the_run(tmp_path: Path) -> None:
    requested = {"epochs": 1, "batch_size": 32}
    small = {"model_args": {"dim": 8, "depth": 2, "heads": 2, "patch": 4}, "fraction": 0.1}
    plain = train("vit_demo", "digits", recipe=recipe("demo", **requested), out=tmp_path / "plain", **small)
    final = train("vit_demo", "digits", recipe=recipe("demo", ema=1e-9, **requested), out=tmp_path / "run", **small)
    averaged = read_checkpoint(final.with_name("final_ema.pt"))
    last = read_checkpoint(final)
    assert not (plain.parent / "final_ema.pt").exists()
    assert all(torch.equal(last.state_dict[n], t) for n, t in read_checkpoint(plain).state_dict.items())
    for name, tensor in last.state_dict.items():
        torch.testing.assert_close(averaged.state_dict[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_the_averaged_checkpoint_is_complete_and_no_snapshot_of_the_trajectory(tmp_path: Path) -> None:
    small = {"model_args": {"blocks": (1, 1), "width": 4}, "fraction": 0.1}
    requested = recipe("demo", epochs=2, batch_size=32, ema=0.9)
    final = train("resnet_demo", "digits", recipe=requested, out=tmp_path / "run", snapshots=1, **small)
    path = final.with_name("final_ema.pt")
    found = read_checkpoint(path)
    assert (found.epoch, found.recipe["ema"]) == (2.0, 0.9)
    network, _ = model_without_data(Spec(checkpoint=path))
    _, testing = splits("digits", root=None)
    measured = evaluate(network, [(testing.normalised(testing.inputs), testing.targets)])
    assert found.metrics["loss"] == pytest.approx(measured.loss, rel=1e-5)
    assert found.metrics["loss"] != pytest.approx(read_checkpoint(final).metrics["loss"], rel=3e-5)
    assert path not in [snapshot.path for snapshot in of_run(tmp_path / "run")]

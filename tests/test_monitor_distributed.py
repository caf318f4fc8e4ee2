"""A monitor in two processes of gloo: they train bit for bit as without it, and its rows are those of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_distributed import outcome

from landscape.results import reader

pytestmark = pytest.mark.slow

# One of two processes. Each trains on samples of its own, twice from the same start: alone, and with a monitor that
# measures after every update and between forward and backward passes; then with accumulated micro-batches under DDP and
# FSDP2; then FSDP's first version is given to a monitor.
PROCESS = """
import json, math, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
import landscape

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3))

def bytes_of(tensors):
    return [getattr(t, "full_tensor", lambda t=t: t)().detach().numpy().tobytes().hex() for t in tensors]

def trained(out):
    model = network()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=0.05)
    monitor = None
    if out:
        monitor = landscape.Monitor(
            replica, F.cross_entropy, (inputs, targets), every=1, out=out, optimizer=optimizer, overhead=math.inf
        )
    torch.manual_seed(10 + rank)
    for step in range(6):
        rows = torch.randperm(len(inputs))[:8]
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(replica(inputs[rows]), targets[rows])
        if monitor is not None and step == 3:
            monitor.step(monitor.number + 1)
        loss.backward()
        optimizer.step()
        if monitor is not None:
            monitor.step()
    if monitor is not None:
        monitor.close()
    states = [v for s in optimizer.state.values() for v in s.values()]
    tensors = [*model.state_dict().values(), *states, *(p.grad for p in model.parameters()), torch.get_rng_state()]
    return bytes_of(tensors)

def accumulated(kind, out, start=0):
    torch.manual_seed(1)
    model = whole = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batch = (inputs.double(), targets)
    if kind == "divided":
        for part in (model[0], model):
            fully_shard(part, mesh=mesh)
        batch = (batch[0][rank::2], targets[rank::2])
    if kind == "replicas":
        whole = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    how = {"every": 1, "out": out, "optimizer": optimizer, "overhead": math.inf, "noise": 2, "start": start}
    monitor = landscape.Monitor(whole, F.cross_entropy, batch, **how) if out else None
    share = [rank, rank + 2] if kind != "alone" else range(4)  # of four micro-batches, one process has all
    for step in range(5):
        optimizer.zero_grad()
        for i in share:
            rows = slice(6 * i, 6 * i + 6)
            (F.cross_entropy(whole(inputs[rows].double()), targets[rows]) / len(share)).backward()
        optimizer.step()
        if out:
            monitor.step()
    if out:
        monitor.close()
    return bytes_of(model.state_dict().values())

def failing():
    torch.manual_seed(1)
    model, calls = nn.Linear(6, 3), []
    fully_shard(model, mesh=mesh)
    def loss(outputs, targets):
        calls.append(1)
        if rank == 1 and len(calls) > 20:
            raise ValueError("no memory is left")
        return F.cross_entropy(outputs, targets)
    how = {"every": 1, "out": f"{sys.argv[1]}/failing.h5", "overhead": math.inf}
    monitor = landscape.Monitor(model, loss, (inputs, targets), **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(50):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            monitor.step()
    except RuntimeError as error:
        return str(error)

def refusal(model):
    try:
        landscape.Monitor(model, F.cross_entropy, (inputs, targets), out=f"{sys.argv[1]}/sharded.h5")
    except ValueError as error:
        return str(error)

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
generator = torch.Generator().manual_seed(5)
inputs = torch.randn(24, 6, generator=generator)
targets = (inputs[:, :3] + 0.3 * torch.randn(24, 3, generator=generator)).argmax(dim=1)
alone, watched = trained(None), trained(f"{sys.argv[1]}/run.h5")
accumulated("alone", f"{sys.argv[1]}/alone-{rank}.h5")
accumulated("replicas", f"{sys.argv[1]}/replicas.h5")
divided = [accumulated("divided", out) for out in (f"{sys.argv[1]}/divided.h5", None)]
accumulated("divided", f"{sys.argv[1]}/divided.h5", start=5)
part = network()
fully_shard(part[0], mesh=mesh)
errors = [refusal(FullyShardedDataParallel(network(), device_id=torch.device("cpu"))), refusal(part)]
found = {"same": alone == watched, "weights": watched[0], "generator": watched[-1], "errors": errors}
print(json.dumps(found | {"divided": divided[0] == divided[1], "failed": failing()}), flush=True)
os._exit(0)  # the other one waits for this one until then
"""
ALONG = "update_norm", "predicted_change", "actual_change", "critical_sharpness", "simple_noise_scale"


def test_replicas_and_shards_train_as_without_a_monitor_and_their_rows_are_those_of_one_process(tmp_path: Path) -> None:
    first, second = outcome(["-c", PROCESS, str(tmp_path)])
    for found in (first, second):
        assert found["same"]
        assert found["divided"]
        older, partly = found["errors"]
        assert "is sharded by FSDP, which has no double backward" in older
        assert "the weights of the model are not all divided along one mesh" in partly
        assert "the training ends: with weights divided among processes" in found["failed"]
        assert "\n" not in older + partly + found["failed"]
    assert "no memory is left" in second["failed"]
    assert "no memory is left" not in first["failed"]
    assert first["weights"] == second["weights"]  # so that gradients were shared
    assert first["generator"] != second["generator"]
    ((_, series),) = reader.groups(tmp_path / "run.h5")  # of rank 0 alone
    assert series["step"].values.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert not (tmp_path / "sharded.h5").exists()
    ((_, one),) = reader.groups(tmp_path / "alone-0.h5")
    assert np.isfinite(one["simple_noise_scale"].values[1:]).all()
    for name, steps in (("replicas", 6), ("divided", 5)):
        ((_, several),) = reader.groups(tmp_path / f"{name}.h5")
        for quantity in (*ALONG, "loss", "gradient_norm", "distance"):
            expected, values = (data[quantity].values[:steps] for data in (one, several))
            assert values == pytest.approx(expected, rel=1e-5, nan_ok=True), (name, quantity)
            assert np.isfinite(values[1:]).all()
    assert np.isnan(several["eigenvalue"].values).all()  # Hessian products need the weights after they are freed
    assert np.isfinite(several["distance"].values).tolist() == [True] * 5 + [False] * 6  # of a resumed run: not known

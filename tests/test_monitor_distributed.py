"""A monitor in two processes of gloo: DistributedDataParallel trains bit for bit as without it; FSDP says why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_distributed import outcome

from landscape.results import reader

pytestmark = pytest.mark.slow

# One of two processes. Each trains on samples of its own, twice from the same start: alone, and with a monitor that
# measures after every update and between forward and backward passes; then FSDP's wrappers are given to a monitor.
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
    return [t.numpy().tobytes().hex() for t in tensors]

def refusal(model):
    try:
        landscape.Monitor(model, F.cross_entropy, (inputs, targets), out=f"{sys.argv[1]}/sharded.h5")
    except ValueError as error:
        return str(error)

dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(5)
inputs, targets = torch.randn(24, 6, generator=generator), torch.randint(3, (24,), generator=generator)
alone, watched = trained(None), trained(f"{sys.argv[1]}/run.h5")
sharded, mesh = network(), init_device_mesh("cpu", (2,))
fully_shard(sharded, mesh=mesh)
errors = [refusal(FullyShardedDataParallel(network(), device_id=torch.device("cpu"))), refusal(sharded)]
found = {"same": alone == watched, "weights": watched[0], "generator": watched[-1], "errors": errors}
print(json.dumps(found), flush=True)
dist.barrier()
os._exit(0)
"""


def test_replicas_train_as_without_a_monitor_and_shards_are_refused(tmp_path: Path) -> None:
    first, second = outcome(["-c", PROCESS, str(tmp_path)])
    assert first["same"]
    assert second["same"]
    assert first["weights"] == second["weights"]  # so that gradients were shared
    assert first["generator"] != second["generator"]
    for error in (*first["errors"], *second["errors"]):
        assert "is sharded by FSDP, which has no double backward" in error
        assert "\n" not in error
    ((_, series),) = reader.groups(tmp_path / "run.h5")  # of rank 0 alone
    assert series["step"].values.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert not (tmp_path / "sharded.h5").exists()

"""Plant faults into results files by real commands, and count how many of them `landscape doctor` names.

    python benchmarks/planted_faults.py [--only too_wide,twin] [--folder DIR]

Small networks of digits are trained once (in DIR, which is kept). Each plant is a few commands, with `{run}` for the
first network, and the rules of which at least one must be named for it; nothing else may be named as wrong or
suspicious on the sound files. Exit code 1 where a fault is missed or a sound file is doubted.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch

LANDSCAPE = [sys.executable, "-m", "landscape"]
NETWORKS = {"one": 0, "two": 1}  # seeds
OWN = '''
"""Digits with faults, and networks that misbehave."""

import torch
from torch import nn
from torch.nn import functional

from landscape import models
from landscape.subject.loading.load import load

def _digits(split, count=512):
    subject = load("{one}", split=split, samples=count, batch_size=count)
    images = subject.images
    return images.inputs.float() / 255, images.targets

def _normalised(inputs):
    subject = load("{one}", split="train", samples=2)
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (subject.images.mean, subject.images.std))
    return (inputs - mean) / std

def _set(inputs, targets):
    return torch.utils.data.TensorDataset(_normalised(inputs), targets)

def flipped(split):
    inputs, targets = _digits(split)
    drawn = torch.Generator().manual_seed(0)
    other = torch.randint(1, 10, targets.shape, generator=drawn)
    some = torch.rand(targets.shape, generator=drawn) < 1 / 3
    return _set(inputs, torch.where(some, (targets + other) % 10, targets))

def repeated(split):
    inputs, targets = _digits(split, 64)
    return _set(inputs.repeat(4, 1, 1, 1), targets.repeat(4))

def leaked(split):
    return _set(*_digits("train"))

def shifted(split):
    inputs, targets = _digits(split)
    return _set(inputs, (targets + 1) % 10)

class TrainMode(nn.BatchNorm2d):
    def forward(self, x):
        return functional.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)

def train_mode():
    network = models.build("resnet_demo", classes=10, image_size=16)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = TrainMode
    return network

def focal(outputs, targets):
    loss = functional.cross_entropy(outputs, targets, reduction="none")
    return loss * (1 - torch.exp(-loss)).detach() ** 2
'''


@dataclass(frozen=True)
class Plant:
    """Commands that plant a fault, and the rules of which one names it."""

    rules: str  # alternatives, separated by `|`; "" of a sound file
    commands: Sequence[str]
    before: Callable[[Path], None] | None = None  # what is changed in the folder first
    after: Callable[[Path], None] | None = None  # what is changed in it afterwards
    between: Callable[[Path], None] | None = None  # what is changed before the last command


def edited(change: Callable[[h5py.Group], None]) -> Callable[[Path], None]:
    """The first result of the file, changed in place."""

    def edit(folder: Path) -> None:
        with h5py.File(folder / "r.h5", "a") as file:
            change(next(iter(next(iter(file.values())).values())))

    return edit


def rewritten(change: Callable[[dict[str, torch.Tensor]], None], name: str = "own.pt") -> Callable[[Path], None]:
    """A copy of the first network's checkpoint with changed weights."""

    def write(folder: Path) -> None:
        stored = torch.load(folder / "one.pt", weights_only=False)
        change(stored["state_dict"])
        torch.save(stored, folder / name)

    return write


def _halved(group: h5py.Group) -> None:
    group["eigenvalue"][...] = group["eigenvalue"][...] / 2


def _samples(group: h5py.Group) -> None:
    group.attrs["samples"] = 50_000


def _undone(group: h5py.Group) -> None:
    group["done"][...] = np.where(np.arange(group["done"].size).reshape(group["done"].shape) % 2, 1, 0)


def _dead(state: dict[str, torch.Tensor]) -> None:
    for name, value in state.items():
        if name.startswith("layer3") and value.is_floating_point() and not name.endswith("running_var"):
            value.zero_()


def _same(state: dict[str, torch.Tensor]) -> None:
    """The same weights in another file."""


def _archive(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (256, 16, 16, 3), dtype=np.uint8)
    np.savez(folder / "digits.npz", x=pixels, y=np.arange(256) % 10)


def _archive_changed(folder: Path) -> None:
    with np.load(folder / "digits.npz") as held:
        np.savez(folder / "digits.npz", x=held["x"][::-1], y=held["y"])


def _scaled(state: dict[str, torch.Tensor]) -> None:
    for value in state.values():
        if value.dim() == 2:
            value.mul_(30)


S = "surface {net} --resolution 7 --samples 128"
PLANTS: dict[str, Plant] = {
    "too_wide": Plant("too-wide", [S.format(net="one.pt") + " --range 6"]),
    "too_narrow": Plant("too-narrow", [S.format(net="one.pt") + " --range 0.001"]),
    "even_grid": Plant("no-centre", ["surface one.pt --resolution 6 --samples 128 --range 0.5"]),
    "no_normalisation": Plant(
        "at-chance|contradicts-checkpoint|loss-above-guessing",
        [S.format(net="one.pt") + " --range 0.5 --mean 0,0,0 --std 4,4,4"]),
    "other_normalisation": Plant(
        "contradicts-checkpoint", ["lesion one.pt --samples 256 --mean 0.4,0.4,0.4 --std 0.6,0.6,0.6"]),
    "other_normalisation_of_a_spectrum": Plant(
        "contradicts-checkpoint|at-chance",
        ["hessian one.pt --samples 64 --top 2 --mean 0.9,0.9,0.9 --std 0.5,0.5,0.5"],
    ),
    "permuted_classes": Plant("at-chance", ["calibration one.pt --data mine.py:shifted --samples 256"]),
    "flipped_targets": Plant(
        "contradicts-checkpoint|overconfident", ["calibration one.pt --data mine.py:flipped --samples 512"]),
    "training_mode": Plant(
        "mini-batch", ["surface one.pt --model mine.py:train_mode --data digits --resolution 5 --samples 128"]),
    "leaked_test": Plant("leaked-test", [
        "variance one.pt --data mine.py:leaked --split train --samples 256",
        "calibration one.pt --data mine.py:leaked --split test --samples 256"]),
    "same_weights_in_two_files": Plant(
        "same-weights", ["lesion one.pt --samples 64", "lesion own.pt --samples 64 --label other --out s.h5"],
        rewritten(_same)),
    "twin_in_a_spectrum": Plant(
        "same-weights",
        ["hessian one.pt --samples 64 --top 2", "hessian own.pt --samples 64 --top 2 --label other --out s.h5"],
        rewritten(_same)),
    "two_batches_of_step": Plant(
        "few-values", ["step one.pt --samples 32 --batch-size 16 --optimizer sgd --optimizer-arg lr=0.1"]),
    "one_vector_of_density": Plant("few-vectors|few-values", ["density one.pt --samples 32 --vectors 1 --steps 8"]),
    "two_batches_of_hessian": Plant("few-values", ["hessian one.pt --samples 32 --batch-size 16 --top 2"]),
    "three_groups_of_noise_scale": Plant("few-values", ["noise-scale one.pt --samples 96 --groups 3"]),
    "repeated_samples": Plant("repeated-samples", ["lesion one.pt --data mine.py:repeated --samples 256"]),
    "mixed_seeds": Plant("mixed-seeds", [
        S.format(net="one.pt") + " --range 0.5 --seed 1", S.format(net="two.pt") + " --range 0.5 --seed 2"]),
    "stale_comparison": Plant("stale-comparison", [
        "lesion one.pt two.pt --samples 64", "compare r.h5", "trace one.pt two.pt --samples 64"]),
    "zero_attack": Plant("zero-panel", ["attack one.pt --samples 64 --eps 0 --steps 1"]),
    "unconverged": Plant("unconverged", ["hessian one.pt --samples 32 --top 4 --max-products 6"]),
    "single_kinks": Plant("kinks", ["hessian one.pt --samples 64 --top 2 --kinks single"]),
    "no_verify": Plant("copies", ["hessian one.pt --samples 64 --top 2 --no-verify"]),
    "frozen_statistics": Plant(
        "frozen-statistics", ["line one.pt --along two.pt --bn frozen --samples 128 --resolution 5"]),
    "differing_samples": Plant("differing-protocols", ["lesion one.pt --samples 64", "lesion two.pt --samples 96"]),
    "overflowing_points": Plant("not-finite|too-wide", [S.format(net="one.pt") + " --range 1e12"]),
    "few_per_class": Plant("too-few-samples", ["lesion one.pt --samples 24"]),
    "no_ensemble": Plant(
        "same-members", ["ensemble one.pt own.pt --samples 128"], rewritten(_same)),
    "unfinished": Plant("unfinished", [S.format(net="one.pt") + " --range 0.5 --shard 1/2"]),
    "halved_eigenvalues": Plant("summaries|changed", ["hessian one.pt --samples 64 --top 2"], after=edited(_halved)),
    "edited_samples": Plant("changed|summaries", ["lesion one.pt --samples 64"], after=edited(_samples)),
    # Twelve further ones.
    "untrained": Plant("at-chance", ["lesion --model resnet_demo --data digits --samples 64"]),
    "one_label": Plant(
        "one-label", ["lesion one.pt --samples 64 --label net", "lesion two.pt --samples 64 --label net"]),
    "two_augmentations": Plant("drawn-anew", [
        "lesion one.pt --samples 64 --augment --seed 0", "lesion two.pt --samples 64 --augment --seed 1"]),
    "faint_noise": Plant("flat-panel", ["noise one.pt --samples 64 --eps 0.0001"]),
    "blinding_noise": Plant("saturated-panel", ["noise one.pt --samples 128 --eps 50"]),
    "dead_layers": Plant("dead-layers|at-chance|contradicts-checkpoint", ["variance own.pt --samples 64"],
                         rewritten(_dead)),
    "detached_loss": Plant(
        "derivatives", ["hessian one.pt --samples 64 --top 2 --loss mine.py:focal"]),
    "clipped": Plant("clipped", [S.format(net="one.pt") + " --range 0.5 --batch-size 16 --cap 0.05"]),
    "edited_data": Plant("other-samples", [
        "calibration one.pt --data digits.npz --samples 64", "calibration two.pt --data digits.npz --samples 64"],
        _archive, between=_archive_changed),
    "half_undone": Plant("changed|unfinished", [S.format(net="one.pt") + " --range 0.5"], after=edited(_undone)),
    "scaled_head": Plant("minimum-at-edge|minimum-elsewhere|too-wide", [
        S.format(net="own.pt") + " --range 2"], rewritten(_scaled)),
    "few_snapshots": Plant("short-path", ["trajectory init.pt one.pt two.pt --samples 64"]),
}  # fmt: skip
SOUND: dict[str, Plant] = {
    "surfaces": Plant("", ["surface one.pt two.pt --resolution 11 --samples 512 --range 0.5"]),
    "spectra": Plant("", [
        "hessian one.pt two.pt --samples 128 --top 3 --batch-size 16",
        "trace one.pt two.pt --samples 128 --batch-size 16"]),
    "layers": Plant("", ["features one.pt two.pt --samples 512", "lesion one.pt two.pt --samples 512"]),
    "predictions": Plant("", ["calibration one.pt two.pt", "ensemble one.pt two.pt", "noise one.pt two.pt"]),
    "lines": Plant("", ["line one.pt --along two.pt --samples 512 --resolution 21", "compare r.h5"]),
}  # fmt: skip


def landscape(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with one thread."""
    return subprocess.run(
        [*LANDSCAPE, *words], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip


def train(folder: Path) -> None:
    """The networks of all plants, unless they are there."""
    for name, seed in NETWORKS.items():
        if not (folder / f"runs/{name}/final.pt").exists():
            words = ["train", "resnet_demo", "--data", "digits", "--epochs", "8", "--seed", str(seed), "--quiet"]
            done = landscape(*words, "--snapshots", "1", "--out", f"runs/{name}", folder=folder)
            if done.returncode:
                raise SystemExit(f"training {name}: {done.stderr}")


def findings(name: str, plant: Plant, networks: Path) -> tuple[set[str], list[dict[str, object]]]:
    """The rules of what the doctor finds wrong or suspicious, after the commands of a plant, and the findings."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for network in NETWORKS:
            shutil.copy(networks / f"runs/{network}/final.pt", folder / f"{network}.pt")
        shutil.copy(networks / "runs/one/init.pt", folder / "init.pt")
        (folder / "mine.py").write_text(OWN.replace("{one}", str(folder / "one.pt")))
        if plant.before:
            plant.before(folder)
        for number, command in enumerate(plant.commands, 1):
            words = command.split()
            out = [] if "--out" in words or words[0] == "compare" else ["--out", "r.h5", "--quiet"]
            if plant.between and number == len(plant.commands):
                plant.between(folder)
            done = landscape(*words, *out, folder=folder)
            if done.returncode:
                print(f"  {name}: landscape {command}: {done.stderr.strip()[-300:]}", file=sys.stderr)
        if plant.after:
            plant.after(folder)
        said = landscape("doctor", *sorted(f.name for f in folder.glob("*.h5")), "--json", folder=folder)
        found = json.loads(said.stdout) if said.returncode in (0, 3) else []
        if said.returncode not in (0, 3):
            print(f"  {name}: doctor: {said.stderr}", file=sys.stderr)
    return {one["rule"] for one in found if one["severity"] != "note"}, found


def main() -> None:
    """Plant, ask, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "planted-faults")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    train(asked.folder)
    every = {**PLANTS, **SOUND}
    chosen = [name.strip() for name in asked.only.split(",") if name.strip()] or list(every)
    named = alarms = 0
    for name in chosen:
        rules, found = findings(name, every[name], asked.folder.resolve())
        right = bool(rules & {*every[name].rules.split("|")}) if name in PLANTS else not rules
        named += right and name in PLANTS
        alarms += name in SOUND and not right
        print(f"{'ok    ' if right else 'MISSED' if name in PLANTS else 'ALARM '} {name}: {', '.join(sorted(rules))}")
        for one in found if not right else ():
            print(f"    {one['severity']} ({one['rule']}): {one['text']}\n      {one['remedy']}")
    planted = sum(name in PLANTS for name in chosen)
    print(f"{named} of {planted} planted faults named, {alarms} false alarms on {len(chosen) - planted} sound files")
    raise SystemExit(named < planted or alarms > 0)


if __name__ == "__main__":
    main()

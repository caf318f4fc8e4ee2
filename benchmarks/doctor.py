"""What `landscape doctor` names of planted faults, and whether it stays silent on sound measurements.

    python benchmarks/doctor.py FOLDER [--set tuning|held-out] [--only NAME,...] [--data-root DIR]

Trains small networks of digits (once, in FOLDER), measures every case by real commands, and prints a table. A fault is
measured in a wrong way where a command can do that, and planted into the stored numbers otherwise. A fault counts as
named if a finding that is wrong or suspicious has its rule; a sound file counts as silent without any such finding. The
rules were written with the set `tuning` in view; `held-out` has other seeds, networks, samples and strengths.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from landscape.cli.main import exit_code
from landscape.doctor.rules import examine
from landscape.results.group import results_in

os.environ["OMP_NUM_THREADS"] = "1"
MODELS = ("resnet_demo", "vit_demo", "preresnet_demo", "alternet_demo")
OWN = """
import torch
from landscape import data as sets

def shuffled(split="train"):  # the class numbers of another order
    images = sets.load("digits", split=split)
    order = torch.tensor([3, 7, 0, 9, 5, 1, 8, 2, 4, 6])
    return inputs(images), order[images.targets]

def inputs(images):
    mean, std = (torch.tensor(value).view(1, -1, 1, 1) for value in (images.mean, images.std))
    return (images.inputs.float() / 255 - mean) / std

class Noisy(torch.utils.data.Dataset):  # a random transform in the data set
    def __init__(self, split):
        images = sets.load("digits", split=split)
        self.inputs, self.targets = inputs(images), images.targets
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, i):
        return self.inputs[i] + 0.1 * torch.randn_like(self.inputs[i]), int(self.targets[i])

def noisy(split="train"):
    return Noisy(split)
"""


@dataclass(frozen=True)
class Study:
    """What the cases of one set differ in."""

    seed: int  # of training
    order: tuple[int, ...]  # of the networks
    samples: int
    resolution: int
    strength: float  # of faults: above 1 weaker

    def net(self, k: int, file: str = "final.pt", *, seed: int | None = None) -> str:
        """The path of a network's checkpoint."""
        return f"nets/{MODELS[self.order[k]]}-{seed or self.seed}/{file}"

    def convolutional(self, file: str = "final.pt", *, seed: int | None = None) -> str:
        """One with batch norm."""
        return f"nets/{'resnet_demo' if self.order[0] == 0 else 'preresnet_demo'}-{seed or self.seed}/{file}"


STUDIES = {
    "tuning": Study(seed=1, order=(0, 1, 2, 3), samples=128, resolution=7, strength=1.0),
    "held-out": Study(seed=3, order=(2, 3, 0, 1), samples=192, resolution=7, strength=1.5),
}
Words = Sequence[object]
Case = tuple[tuple[str, ...], list[Words], Callable[[h5py.File], None] | None]  # rules, commands, change of the file


def faults(s: Study) -> dict[str, Case]:
    """The planted faults: rules that name them, the commands, and what is changed in the file."""
    a, b, conv = s.net(0), s.net(1), s.convolutional()
    n, grid = ("--samples", s.samples), ("--resolution", s.resolution)
    spectrum = ("--hvp", "double-backward", "--samples")
    far = 8 / s.strength
    near = 0.0002 * s.strength
    own = ("--data", "own.py:shuffled")

    def pixels(mean: float, std: float) -> Words:
        return "--mean", ",".join([str(mean)] * 3), "--std", ",".join([str(std * s.strength)] * 3)

    surface: Words = ("surface", a, *grid, *n)

    def case(rule: str, *commands: Words, change: Callable[[h5py.File], None] | None = None) -> Case:
        return tuple(rule.split()), list(commands), change

    return {
        "range far too wide": case("too-wide", (*surface, "--range", far)),
        "range too wide": case("too-wide", ("surface", b, *grid, *n, "--range", far / 2)),
        "line too wide": case("too-wide", ("line", a, "--resolution", 11, *n, "--range", far)),
        "range too narrow": case("too-narrow", (*surface, "--range", near)),
        "range too narrow, other network": case("too-narrow", ("surface", b, *grid, *n, "--range", near)),
        "line too narrow": case("too-narrow", ("line", b, "--resolution", 11, *n, "--range", near)),
        "basin outside the range": case("minimum-at-edge no-centre", (*surface, "--range", "0.4:1.4,-0.5:0.5")),
        "no grid point at the centre": case("no-centre", ("surface", b, "--resolution", s.resolution + 1, *n)),
        "untrained network, surface": case(
            "at-chance", ("surface", "--model", MODELS[s.order[2]], "--data", "digits", *grid, *n)),
        "untrained network, Hessian": case(
            "at-chance", ("hessian", "--model", MODELS[s.order[3]], "--data", "digits", *spectrum, 176)),
        "classes in another order, surface": case("at-chance", (*surface, *own)),
        "classes in another order, calibration": case("at-chance", ("calibration", b, *own)),
        "classes in another order, lesion": case("at-chance", ("lesion", a, *own)),
        "wrong normalisation": case("at-chance minimum-elsewhere", (*surface, *pixels(0.9, 0.1))),
        "wrong normalisation in one of two": case(
            "losses-disagree", (*surface, "--range", 0.5),
            ("line", a, "--resolution", 9, *n, *pixels(0.2, 0.2))),
        "too few Lanczos steps": case("unconverged", ("hessian", a, *spectrum, 176, "--max-products", 6)),
        "too few Lanczos steps, convexity": case(
            "unconverged", ("convexity", b, "--resolution", 3, "--samples", 32, "--max-products", 6)),
        "three mini-batches": case("few-batches", ("hessian", b, *spectrum, 16 * 3)),
        "kinks of one side": case("kinks", ("hessian", conv, *spectrum, 176, "--kinks", "single")),
        "one random vector": case("few-vectors", ("density", a, *spectrum, 64, "--vectors", 1, "--steps", 10)),
        "two random vectors": case(
            "few-vectors", ("density", s.convolutional(), *spectrum, 64, "--vectors", 2, "--steps", 10)),
        "two numbers of samples": case(
            "differing-protocols", surface, ("surface", b, *grid, "--samples", s.samples // 2)),
        "two batch sizes": case(
            "differing-protocols", ("hessian", a, *spectrum, 176), ("hessian", b, *spectrum, 352, "--batch-size", 32)),
        "train and test": case("differing-protocols", ("lesion", a), ("lesion", b, "--split", "train")),
        "two amplitudes of noise": case("differing-protocols", ("noise", a, "--eps", 0.7), ("noise", b, "--eps", 0.3)),
        "two normalisations of directions": case(
            "differing-protocols", surface, ("surface", b, *grid, *n, "--normalize", "layer")),
        "one checkpoint, two labels": case(
            "same-weights", ("trace", a, *spectrum, 64, "--label", "ours"),
            ("trace", a, *spectrum, 64, "--vectors", 24, "--label", "theirs")),
        "two checkpoints, one label": case(
            "one-label", ("lesion", a, "--label", "net"), ("lesion", b, "--label", "net")),
        "half of the Hessian": case("unfinished", ("hessian", a, *spectrum, 176, "--shard", "1/2")),
        "a third of the surface": case("unfinished", (*surface, "--shard", "1/3")),
        "batch norm frozen on a line": case(
            "frozen-statistics",
            ("line", conv, "--along", s.convolutional("init.pt"), "--bn", "frozen", "--resolution", 5, *n)),
        "batch norm frozen on a plane": case(
            "frozen-statistics",
            ("surface", conv, "--plane", f"{s.convolutional('init.pt')},{s.convolutional('warmup.pt')}",
             "--bn", "frozen", "--resolution", 5, *n)),
        "a path of three snapshots": case(
            "short-path",
            ("trajectory", "--run", ",".join(s.net(0, f) for f in ("init.pt", "warmup.pt", "final.pt")), a, *n)),
        "16 samples, lesion": case("too-few-samples", ("lesion", a, "--samples", 16)),
        "32 samples, two networks": case(
            "too-few-samples", ("calibration", a, "--samples", 32), ("calibration", b, "--samples", 32)),
        "noise too weak": case("flat-panel", ("noise", a, "--eps", 0.0002 / s.strength)),
        "attack too strong": case(
            "saturated-panel", ("attack", a, "--eps", "120/255,200/255", "--steps", 5, "--samples", 128)),
        "random transforms in the data": case(
            "drawn-anew", ("lesion", a, "--data", "own.py:noisy"), ("lesion", b, "--data", "own.py:noisy")),
        "augmented with two seeds": case(
            "drawn-anew", (*surface, "--augment"), ("surface", b, *grid, *n, "--augment", "--seed", 1)),
        "cap inside the basin": case("clipped", (*surface, "--cap", 0.2, "--range", 2, "--batch-size", 32)),
        "one network twice": case("same-members same-weights", ("ensemble", a, a, "--samples", 128)),
        "losses that are not finite": case("not-finite", surface, change=_not_finite),
        "other samples": case(
            "other-samples", ("calibration", a), ("calibration", s.net(0, seed=2)), change=_other_samples),
        "dead layer": case("dead-layers", ("variance", a), change=_dead),
    }  # fmt: skip


def sound(s: Study) -> dict[str, list[Words]]:
    """Honest measurements, one file each."""
    spectrum = ("--hvp", "double-backward", "--samples")
    found: dict[str, list[Words]] = {}
    for k, name in enumerate(MODELS[i] for i in s.order):
        net, other = s.net(k), s.net(k, seed=2)
        found |= {
            f"surface {name}": [("surface", net, "--resolution", 15, "--samples", 2 * s.samples)],
            f"line {name}": [("line", net, "--resolution", 21, "--directions", 2, "--samples", 2 * s.samples)],
            f"hessian {name}": [("hessian", net, *spectrum, 16 * (12 + k), "--top", 3 + k)],
            f"trace {name}": [("trace", net, "--vectors", 24, "--batch-size", 64, *spectrum, 128)],
            f"density {name}": [("density", net, *spectrum, 64 + 32 * k, "--vectors", 8, "--steps", 20)],
            f"features {name}": [("features", net)],
            f"lesion and noise {name}": [("lesion", net, "--split", "train"), ("noise", net, "--split", "train")],
            f"trajectory {name}": [("trajectory", net, "--samples", 2 * s.samples)],
            f"calibration {name}": [("calibration", net), ("probe-linear", net)],
            f"barrier {name}": [("line", net, other, "--resolution", 11, "--samples", 2 * s.samples)],
            f"two seeds {name}": [("variance", net, "--label", "one"), ("variance", other, "--label", "two")],
        }
    return found


def on_photographs(networks: Path, data_root: Path) -> dict[str, list[Words]]:
    """Honest measurements of networks of CIFAR-10: `NAME_demo-cifar10/final.pt`."""
    nets = [str(path) for path in sorted(networks.glob("*-cifar10/final.pt"))]
    data = ("--data", "cifar10", "--data-root", data_root, "--samples")
    found: dict[str, list[Words]] = {}
    for net in nets:
        name = Path(net).parent.name
        found[f"surface {name}"] = [("surface", net, "--resolution", 9, *data, 256)]
        found[f"hessian {name}"] = [("hessian", net, "--hvp", "double-backward", *data, 160)]
        found[f"features {name}"] = [("features", net, *data, 512)]
    found["calibration of all"] = [("calibration", net, *data, 1000) for net in nets]
    found["lesion of all"] = [("lesion", net, *data, 512) for net in nets]
    return found


def _not_finite(file: h5py.File) -> None:
    for _, group in results_in(file):
        loss = group["loss"][()]
        loss[0, :2] = np.inf
        group["loss"][...] = loss


def _other_samples(file: h5py.File) -> None:
    (_, group), *_ = results_in(file)
    group.attrs["data_sha256"] = "0" * 64


def _dead(file: h5py.File) -> None:
    (_, group), *_ = results_in(file)
    for name in ("variance", "variance_normalised"):
        values = group[name][()]
        values[-1] = 0.0
        group[name][...] = values


def train(folder: Path, seeds: Sequence[int]) -> None:
    """The networks that are not there yet."""
    for model in MODELS:
        for seed in seeds:
            place = folder / "nets" / f"{model}-{seed}"
            if not (place / "final.pt").exists():
                words = ["train", model, "--data", "digits", "--epochs", "12", "--seed", str(seed), "--quiet"]
                assert exit_code([*words, "--out", str(place)]) == 0


def measured(file: Path, commands: Sequence[Words], change: Callable[[h5py.File], None] | None = None) -> str:
    """Run the commands into a file that is not there yet; what went wrong, or ""."""
    if file.exists():
        return ""
    said = io.StringIO()
    part = file.with_suffix(".part.h5")
    part.unlink(missing_ok=True)
    for words in commands:
        with contextlib.redirect_stderr(said):
            code = exit_code([*map(str, words), "--out", str(part), "--quiet"])
        if code > 128:  # interrupted or terminated
            raise SystemExit(code)
        if code:
            return f"exit code {code}: {said.getvalue().strip().splitlines()[-1]}"
    if change is not None:
        with h5py.File(part, "r+") as opened:
            change(opened)
    part.rename(file)
    return ""


def main() -> None:
    """Measure and examine every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", choices=STUDIES, default="held-out")
    parser.add_argument("--only", default="", help="faults, sound, or words of names")
    parser.add_argument("--networks", type=Path, help="folder of networks of CIFAR-10, measured too")
    parser.add_argument("--data-root", type=Path, help="folder of CIFAR-10")
    given = parser.parse_args()
    folder, study = given.folder.resolve(), STUDIES[given.set]
    networks, data_root = (path.resolve() if path else None for path in (given.networks, given.data_root))
    results = folder / given.set
    results.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    Path("own.py").write_text(OWN)
    sys.path.insert(0, str(folder))
    train(folder, sorted({study.seed, 2}))
    honest = sound(study) | (on_photographs(networks, data_root) if networks and data_root else {})
    cases = [("fault", name, *case) for name, case in faults(study).items()]
    cases += [("sound", name, (), commands, None) for name, commands in honest.items()]
    right: dict[str, list[bool]] = {"fault": [], "sound": []}
    noted = 0
    print("| case | named as | seconds |\n| --- | --- | --- |")
    for kind, name, rules, commands, change in cases:
        if given.only and not any(word in f"{kind}s {name}" for word in given.only.split(",")):
            continue
        start = time.process_time()
        file = results / f"{kind}-{name.replace(' ', '-').replace(',', '')}.h5"
        if problem := measured(file, commands, change):
            print(f"| {kind}: {name} | NOT MEASURED: {problem} | |", flush=True)
            continue
        found = [(finding.rule, finding.severity) for finding in examine([file])]
        named = [rule for rule, severity in found if severity != "note"]
        ok = bool(set(rules) & set(named)) if kind == "fault" else not named
        right[kind].append(ok)
        noted += kind == "sound" and any(severity == "note" for _, severity in found)
        said = ", ".join(dict.fromkeys(named)) or "nothing"
        print(
            f"| {kind}: {name} | {'' if ok else '**'}{said}{'' if ok else '**'} | {time.process_time() - start:.0f} |",
            flush=True,
        )
    for kind, word in (("fault", "named"), ("sound", "silent")):
        print(f"\n{kind}: {sum(right[kind])} of {len(right[kind])} {word}")
    print(f"sound files with a note: {noted}")


if __name__ == "__main__":
    main()

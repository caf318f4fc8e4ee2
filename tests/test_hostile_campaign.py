"""Relatives of hostile files, made at random: every one ends in a line with its name, in little memory and time."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import resource
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import forked
import h5py
import hostile
import numpy as np
import pytest
import torch

from landscape.results.journal import MAGIC, Journal, Record

COUNT, SECONDS, MEMORY = int(os.environ.get("RELATIVES", "60")), 20, 500 * 2**20
Draw = random.Random


def number(draw: Draw) -> int:
    return draw.choice([10**6, 10**9, 2**31 - 1, 2**40, 2**62, 10**30]) + draw.randrange(1000)


def archive(path: Path, draw: Draw) -> list[str]:
    """Arrays of zeros that unpack to gigabytes, or whose header says more."""
    side = draw.choice([1000, 4000, 16_000])
    shape = (8, 3, side, side)
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": draw.choice(["<f8", "|u1"]), "fortran_order": False, "shape": shape}
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        with file.open("x.npy", "w") as stream:
            stream.write(head.getvalue())
            for _ in range(draw.choice([1, 64, 256])):
                stream.write(bytes(2**20))
        with file.open("y.npy", "w") as stream:
            np.save(stream, np.zeros(8, np.int64))
    return ["trace", "--model", "resnet_demo", "--data", str(path)]


def header(path: Path, draw: Draw) -> list[str]:
    shape = [number(draw) for _ in range(draw.choice([1, 2, 5]))]
    hostile.header(path, draw.choice([0, 10, 2**40]), {"w": hostile.entry(shape, end=number(draw))}, bytes(16))
    return draw.choice([["show", str(path)], ["trace", str(path), *BESIDE]])


def adapter(path: Path, draw: Draw) -> list[str]:
    path.mkdir()
    pattern = draw.choice(["(a+)+$", "(w|w)*x", "(.*)*y", "([a-z]+)*1"])
    given: dict[str, object] = {"peft_type": "LORA", "r": draw.choice([2, number(draw)]), "target_modules": pattern}
    given["rank_pattern"] = {draw.choice(["weight", pattern]): number(draw)}
    (path / "adapter_config.json").write_text(json.dumps(given))
    torch.save({"base_model.model.x.lora_A.weight": torch.ones(2, 4)}, path / "adapter_model.bin")
    return ["trace", str(path), *BESIDE]


def nested(path: Path, draw: Draw) -> list[str]:
    depth = draw.choice([1_000, 100_000, 1_000_000])
    text = draw.choice(["[" * depth, '{"a":' * depth, "9" * depth, '"' + "\\u0000" * depth])
    path.write_text(text)
    return ["trace", *BESIDE, "--scheduler", str(path)]


def results(path: Path, draw: Draw) -> list[str]:
    """A results file with arrays far larger than it, never written, packed, or of lists of scales without end."""
    size = draw.choice([2**20, 2**26, 2**30, 2**34])
    with h5py.File(path, "w") as file:
        file.attrs["format"] = 1
        group = file.create_group("trace/a-0123456789")
        group.attrs.update({"probe": "trace", "label": "a", "spec": "{}", "parameters": "{}"})
        group.attrs["note"] = "x" * draw.choice([10, 60_000])
        data = group.create_dataset(
            "trace", (size,), "f8", chunks=(2**17,), compression=draw.choice([None, "gzip"]), fillvalue=0.0
        )
        scale = group.create_dataset("vector", (draw.choice([1, 1000]),), "f8")
        scale.make_scale("vector")
        for _ in range(draw.choice([1, 300])):
            data.dims[0].attach_scale(scale)
        group["done"] = np.ones(3, np.uint8)
        packed = group.create_dataset("packed", (2**22,), "f8", chunks=(2**22,), compression="gzip")
        packed[:] = 0.0
    words = draw.choice([["show"], ["merge"], ["repair"], ["doctor"], ["plot"]])
    return [
        *words,
        str(path),
        *(["--out", str(path.with_suffix(".out.h5"))] if words[0] in ("merge", "repair") else []),
    ]


def journal(path: Path, draw: Draw) -> list[str]:
    """A journal of no journal's form, or a whole one that declares axes, types, arrays or attributes without end."""
    name = path.with_name(f"{path.name}.journal-0123456789")
    if draw.random() < 0.3:
        name.write_bytes(draw.choice([b"LJ" * 900_000, MAGIC + b"[" * 10**6, os.urandom(1000) * 1000]))
        return ["merge", str(path), "--out", str(path.with_suffix(".out.h5"))]
    number_ = {"long_name": "n", "units": "", "dims": [], "dtype": draw.choice(["float64", "uint8", "S2000000000"])}
    wide = {**number_, "dims": draw.choice([[], ["b"], ["b", "c"]])}
    key = {
        "probe": "variance", "label": "x" * draw.choice([1, 10**6]), "digest": "0123456789", "over": ["a"],
        "axes": ["b", "c"], "about": {}, "labels": {}, "quantities": {"loss": draw.choice([number_, wide])},
        "summaries": {f"s{i}": wide for i in range(draw.choice([0, 1, 5000]))},
        "facts": {f"f{i}": draw.choice([1, "x" * 1000]) for i in range(draw.choice([0, 600]))},
        "grows": draw.choice([False, True]),
    }  # fmt: skip
    size = draw.choice([10, 4000, 30_000])
    with Journal(name) as made:
        axes = {f"axis:{axis}": np.zeros(size, np.uint8) for axis in "bc"}
        axes["axis:a"] = np.zeros(draw.choice([0, 3]), np.int64)
        made.append(Record({"key": key, "attributes": {}}, axes))
        made.append(Record(draw.choice([{"index": [0]}, {"at": 1}, {"after": 0}]), {"loss": np.float64(1)}))
    return ["merge", str(path), "--out", str(path.with_suffix(".out.h5"))]


def provider(path: Path, draw: Draw) -> list[str]:
    """A folder of a few weights whose configuration describes a large network, or a file that names one."""
    pytest.importorskip("transformers")
    kind = draw.choice(["vit", "resnet", "convnext", "swin", "gpt2", "mixtral", "clip"])
    sizes = ("hidden_size", "num_hidden_layers", "num_labels", "image_size", "vocab_size", "num_local_experts")
    given: dict[str, object] = {name: draw.choice([12, 9000, number(draw)]) for name in draw.sample(sizes, 2)}
    config = {"model_type": kind, **draw.choice([{}, given, {"vision_config": given}])}
    hostile.hugging_face(path, hostile.weights())
    (path / "config.json").write_text(json.dumps(config))
    return draw.choice([["trace", str(path), *BESIDE[2:]], ["trace", "--model", f"hf:{path}", *BESIDE[2:]]])


def picture(path: Path, draw: Draw) -> list[str]:
    side = draw.choice([30_000, 60_000, 2**31 - 1])
    body = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)

    def part(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    (path / "a").mkdir(parents=True)
    content = (
        b"\x89PNG\r\n\x1a\n" + part(b"IHDR", body) + part(b"IDAT", zlib.compress(bytes(10**6))) + part(b"IEND", b"")
    )
    (path / "a" / "x.png").write_bytes(content)
    return ["trace", "--model", "resnet_demo", "--data", str(path)]


def table(path: Path, draw: Draw) -> list[str]:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = draw.choice([1, 3])
    pixels = [bytes(draw.choice([100, 30 * 2**20, 80 * 2**20]))] * rows
    parquet.write_table(pyarrow.table({"image": pixels, "label": [0] * rows}), path, compression="zstd")
    return ["trace", "--model", "resnet_demo", "--data", str(path)]


def grid(path: Path, draw: Draw) -> list[str]:
    line = draw.choice([",".join(["1"] * 200_000), "1e999,nan," * 10, "x" * 10**6, "1,2,3,4,5"])
    path.write_text("\n".join([line] * draw.choice([1, 20])))
    return ["import", str(path)]


KINDS: dict[str, Callable[[Path, Draw], list[str]]] = {
    ".npz": archive, ".safetensors": header, "-tuned": adapter, ".json": nested, ".h5": results,
    ".journal.h5": journal, "-provider": provider, "-pictures": picture, ".parquet": table, ".csv": grid,
}  # fmt: skip
BESIDE = ["--model", "../mine.py:model", "--data", "../mine.py:data"]
MEASURED = """
import sys
sys.path.insert(0, sys.argv[1])
from test_hostile_campaign import campaign
campaign(int(sys.argv[2]))
"""


def campaign(count: int) -> None:
    """Print for each relative its name, command, exit code, last line, memory above the start, and seconds."""
    import landscape.data  # noqa: F401
    from landscape.cli.main import exit_code

    for i in range(count):
        draw = random.Random(i)
        kind = list(KINDS)[i % len(KINDS)]
        path = Path(f"file{i}{kind}").absolute()
        words = KINDS[kind](path, draw)
        if words[0] in ("trace", "import"):
            words += ["--out", "r.h5"] + (["--quiet"] if words[0] == "trace" else [])
        sys.stdout.flush()
        if os.fork() == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            start = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            error = io.StringIO()
            with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
                code = exit_code(words)
            last = ["", *error.getvalue().splitlines()][-1]
            used = resource.getrusage(resource.RUSAGE_SELF)
            print(
                json.dumps([path.name, words[0], code, last, used.ru_maxrss * 1024 - start, used.ru_utime]), flush=True
            )
            os._exit(0)
        _, status = os.wait()
        if status:
            print(json.dumps([path.name, words[0], f"status {status}", "", 0, 0]), flush=True)


@pytest.mark.slow
@pytest.mark.campaign
def test_relatives_of_hostile_files_end_in_a_line_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef model(): return torch.nn.Sequential(torch.nn.Linear(4, 300))\n"
        "def data(): return torch.ones(8, 4), torch.ones(8).long()\n"
    )
    (tmp_path / "inside").mkdir()
    ended = forked.Popen(["-c", MEASURED, str(Path(__file__).parent), str(COUNT)], cwd=str(tmp_path / "inside"))
    out, errors = ended.communicate(timeout=3000)
    told = [json.loads(line) for line in out.splitlines()]
    assert len(told) == COUNT, errors[-2000:]
    wrong = [
        one
        for one in told
        if not (one[2] in (0, 3) or (one[2] == 1 and re.fullmatch(f"landscape: .*{re.escape(one[0])}.*", one[3])))
        or "--debug" in one[3]
        or one[4] > MEMORY
        or one[5] > SECONDS
    ]
    assert wrong == []

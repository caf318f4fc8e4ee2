"""Hostile files: checkpoints and data as from an untrusted source, each made by its own function."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

HUGE = 2**60
LONG = b"\x8a\x08" + struct.pack("<q", HUGE)  # that number in a pickle


def _long(number: int) -> bytes:
    """That number in a pickle."""
    raw = number.to_bytes(16, "little")
    return b"\x8a" + bytes([len(raw)]) + raw


class Call:
    """What pickle turns into a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def system(ran: Path) -> Call:
    return Call(os.system, f"touch {ran}")


def weights() -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(300, 4), "bias": torch.zeros(300)}


def zipped(path: Path, pkl: bytes, **members: bytes) -> None:
    """An archive as torch.save lays it out, around any pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pkl)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        for name, content in members.items():
            archive.writestr(f"archive/data/{name}", content)


def repickled(path: Path, change: Callable[[bytes], bytes]) -> None:
    """A file of torch.save whose pickle was changed afterwards."""
    stream = io.BytesIO()
    torch.save({"weight": torch.ones(4)}, stream)
    with zipfile.ZipFile(stream) as good:
        (name,) = (name for name in good.namelist() if name.endswith("data.pkl"))
        changed = change(good.read(name))
        assert changed != good.read(name)
        with zipfile.ZipFile(path, "w") as archive:
            for member in good.namelist():
                archive.writestr(member, changed if member == name else good.read(member))


def legacy(path: Path, content: object) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


def hugging_face(folder: Path, content: object) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    torch.save(content, folder / "pytorch_model.bin")


def shards(folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder.parent / "x.safetensors").write_bytes(save(weights()))
    index = {"metadata": {}, "weight_map": {"weight": name, "bias": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def header(path: Path, length: int, entries: object, content: bytes = b"") -> None:
    raw = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", length or len(raw)) + raw + content)


def entry(shape: list[int], dtype: str = "F32", end: int = 16) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


class Writer(nn.Module):
    """A TorchScript model that writes a file when it runs."""

    def __init__(self, ran: str) -> None:
        super().__init__()
        self.ran = ran
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, self.ran)
        return self.layer(x)


def native(model: str, arguments: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": 1, "model": model, "model_args": arguments, "state_dict": weights(), "data": data, "recipe": {},
        "epoch": 1.0, "metrics": {}, "seed": 0, "versions": {},
    }  # fmt: skip


def overlapping(path: Path) -> None:
    """Many names for the same bytes: each is honest, all together are not."""
    content = bytes(2**20)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/data/0", content)
        for i in range(1, 200):
            twin = zipfile.ZipInfo(f"archive/data/{i}")
            first = archive.getinfo("archive/data/0")
            twin.file_size, twin.compress_size, twin.CRC = first.file_size, first.compress_size, first.CRC
            twin.header_offset = first.header_offset
            archive.filelist.append(twin)
            archive.NameToInfo[twin.filename] = twin
        archive._didModify = True


def deflated(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"0" * 40_000_000)


def traversing(path: Path) -> None:
    stream = io.BytesIO()
    torch.save(weights(), stream)
    path.write_bytes(stream.getvalue())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../../outside", "x")


CODE: dict[str, Callable[[Path, Path], object]] = {
    "zip.pt": lambda path, ran: torch.save(system(ran), path),
    "legacy.pth": lambda path, ran: legacy(path, system(ran)),
    "bare.pkl": lambda path, ran: path.write_bytes(pickle.dumps(system(ran))),
    "protocol0.pth": lambda path, ran: path.write_bytes(pickle.dumps(system(ran), protocol=0)),
    "protocol5.bin": lambda path, ran: path.write_bytes(pickle.dumps({"state_dict": system(ran)}, protocol=5)),
    "lightning.ckpt": lambda path, ran: torch.save({"state_dict": weights(), "callbacks": {"x": system(ran)}}, path),
    "weights.bin": lambda path, ran: torch.save({"weight": system(ran)}, path),
    "folder": lambda path, ran: hugging_face(path, {"weight": system(ran)}),
    "nested.pt": lambda path, ran: torch.save({"model": {"a": [{"b": (system(ran),)}]}}, path),
    "key.pt": lambda path, ran: torch.save({"state_dict": weights(), system(ran): 1}, path),
    "tensor.pt": lambda path, ran: torch.save({"weight": Call(torch._utils._rebuild_tensor_v2, system(ran))}, path),
    "parameter.pt": lambda path, ran: torch.save(
        {"weight": Call(torch._utils._rebuild_parameter, torch.ones(2), True, system(ran))}, path
    ),
    "typed.pt": lambda path, ran: torch.save(
        {"weight": Call(torch._tensor._rebuild_from_type_v2, os.system, str, (f"touch {ran}",), None)}, path
    ),
    "array.npy": lambda path, ran: np.save(path, np.array([system(ran)], dtype=object), allow_pickle=True),
    "arrays.npz": lambda path, ran: np.savez(path, x=np.array([system(ran)], dtype=object)),
    "script.pt": lambda path, ran: torch.jit.script(Writer(str(ran))).save(str(path)),
    "named-model.pt": lambda path, ran: torch.save(native("os:system", {"command": f"touch {ran}"}, {}), path),
    "named-data.pt": lambda path, ran: torch.save(
        native("resnet_demo", {}, {"name": f"{_evil(path, ran)}:data", "size": 8}), path
    ),
}  # fmt: skip


def _evil(path: Path, ran: Path) -> Path:
    """A Python file beside the checkpoint, as of an unpacked download."""
    code = path.with_suffix(".py")
    code.write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\ndef data(): pass\n")
    return code


ABSURD: dict[str, Callable[[Path], object]] = {
    "deflated.pt": deflated,
    "overlapping.pt": overlapping,
    "traversing.pt": traversing,
    "memo.pt": lambda path: zipped(path, b"\x80\x02]r\xff\xff\xff\x7f."),  # an index into a memo of 2**31 entries
    "memo.pth": lambda path: path.write_bytes(b"\x80\x02]r\xff\xff\xff\x7f."),
    "bytes.pth": lambda path: path.write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", HUGE) + b"x."),
    "text.pt": lambda path: zipped(path, b"\x80\x04\x8d" + struct.pack("<Q", HUGE) + b"x."),
    "deep.pt": lambda path: zipped(path, b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."),
    "pointer.pt": lambda path: torch.save(
        {"state_dict": weights(), "x": Call(np.ndarray, (1,), np.dtype("O"), b"A" * 8)}, path
    ),
    "many-objects.pt": lambda path: torch.save(
        Call(np._core.multiarray._reconstruct, np.ndarray, (2**40,), np.dtype("O")), path
    ),
    "storage.pt": lambda path: repickled(path, lambda p: p.replace(b"K\x04tq", LONG + b"tq")),
    "storage.pth": lambda path: path.write_bytes(
        _legacy_bytes().replace(b"K\x04N", LONG + b"N", 1)
    ),
    "expanded.pt": lambda path: torch.save({"weight": torch.ones(1).expand(2**40)}, path),
    "expanded-far.pt": lambda path: torch.save({"weight": torch.ones(1).expand(2**30, 2**29)}, path),
    "meta.pt": lambda path: torch.save({"weight": torch.empty(2**50, device="meta")}, path),
    "sparse.pt": lambda path: torch.save({"weight": torch.eye(3).to_sparse()}, path),
    "far-model.pt": lambda path: torch.save(native("resnet_demo", {"classes": 10**12}, {"name": "digits"}), path),
    "far-images.pt": lambda path: torch.save(
        native("resnet_demo", {}, {"name": "digits", "classes": 10, "size": 10**9}), path
    ),
    "far-mean.pt": lambda path: torch.save(native("resnet_demo", {}, {"name": "digits", "mean": {"a": 1}}), path),
    "header.safetensors": lambda path: header(path, HUGE, {}),
    "long-header.safetensors": lambda path: header(path, 2**40, {"w": entry([4])}, bytes(16)),
    "shape.safetensors": lambda path: header(path, 0, {"w": entry([HUGE])}, bytes(16)),
    "overflow.safetensors": lambda path: header(path, 0, {"w": entry([2**32, 2**32, 4])}, bytes(16)),
    "negative.safetensors": lambda path: header(path, 0, {"w": entry([-4])}, bytes(16)),
    "dtype.safetensors": lambda path: header(path, 0, {"w": entry([4], "X99")}, bytes(16)),
    "beyond.safetensors": lambda path: header(path, 0, {"w": entry([4], end=HUGE)}, bytes(16)),
    "list.safetensors": lambda path: header(path, 0, [1, 2], bytes(16)),
    "nested.safetensors": lambda path: path.write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000),
    "shards-up": lambda path: shards(path, "../x.safetensors"),
    "shards-far": lambda path: shards(path, "../../x.safetensors"),
    "shards-absolute": lambda path: shards(path, "/etc/passwd"),
    "shards-nul": lambda path: shards(path, "x\0.safetensors"),
    "shards-dot": lambda path: shards(path, "."),
    "shards-gone": lambda path: shards(path, "none.safetensors"),
    "index-list": lambda path: (shards(path, "x"), (path / "model.safetensors.index.json").write_text("[1]")),
    "index-deep": lambda path: (shards(path, "x"), (path / "model.safetensors.index.json").write_text("[" * 10**5)),
    "keras.h5": lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100)),
    "docx.pt": lambda path: _docx(path),
    "zeros.pt": lambda path: path.write_bytes(bytes(4096)),
    "png.pth": lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100)),
}  # fmt: skip


DOUBLED = b")" + b"2\x86" * 24  # a tuple of a tuple twice, and so on: 17 million values, and as many again per "2\x86"
SHARED = b"]q\x00" + b"".join(b"0(" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"lq" + bytes([i + 1]) for i in range(40))
CALLED = {
    name: b"\x80\x02c" + name.replace(".", "\n").encode() + b"\n]" + DOUBLED + b"a\x85R."
    for name in ("builtins.set", "collections.Counter")
}
# Pickles of a few bytes that stand for work or memory without end.
EXPLODING: dict[str, bytes] = {
    **CALLED,
    "dict": b"\x80\x02cbuiltins\ndict\n]" + DOUBLED + b"K\x01\x86a\x85R.",
    "rebuilt": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nset\nN]" + DOUBLED + b"a\x85tR.",
    "instance": b"(](" + DOUBLED + b"ei__builtin__\nset\n.",
    "key": b"\x80\x02}" + DOUBLED + b"K\x01s.",
    "keys": b"\x80\x02}(" + DOUBLED + b"K\x01u.",
    "pairs": b"(" + DOUBLED + b"K\x01d.",
    "set": b"\x80\x04\x8f(" + DOUBLED + b"\x90.",
    "frozen": b"\x80\x04(" + DOUBLED + b"\x91.",
    "behind-a-name": b"\x80\x02ctorch\nAnyone\n}" + DOUBLED + b"K\x01s.",
    "values": b"\x80\x02}X\x05\x00\x00\x00epoch" + SHARED + b"s.",
    "tensor": b"\x80\x02ctorch\nFloatTensor\n" + DOUBLED + b"\x85R.",
    "shape": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\x00" + DOUBLED + b")tR.",
    "number": b"\x80\x02\x8b" + struct.pack("<i", 3000) + b"\x7f" * 3000 + b".",
    "one-hash": b"\x80\x02}(" + b"".join(_long(i * (2**61 - 1)) + b"N" for i in range(1000)) + b"u.",
    "tuples": b"\x80\x02}(" + b"".join(b"J" + struct.pack("<i", i) + b"\x85N" for i in range(10_001)) + b"u.",
    "copies": b"\x80\x02](" + b"N" * 100_000 + b"eq\x00" + b"cbuiltins\nlist\nh\x00\x85R" * 300 + b".",
    "text": b"\x80\x02X"
    + struct.pack("<I", 10**6)
    + b"x" * 10**6
    + b"q\x00"
    + b"c_codecs\nencode\nh\x00\x85R" * 30
    + b".",
    "zeros": b"\x80\x02cbuiltins\nbytearray\n" + LONG + b"\x85R.",
    "state": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))tR}X\x05\x00\x00\x00shapeK\x07sb.",
}


def _docx(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "<x/>")


def _legacy_bytes() -> bytes:
    stream = io.BytesIO()
    torch.save({"weight": torch.ones(4)}, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()

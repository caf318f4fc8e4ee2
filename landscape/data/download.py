"""One archive from the network: checked, unpacked in part, put in place at once."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

TIMEOUT = 3.0  # seconds without an answer: a machine without network should learn that soon


def unpack(url: str, *, md5: str, root: Path, folder: str, files: Sequence[str]) -> None:
    """Download a `.tar.gz` and keep the named regular files as `root/folder`.

    The folder appears complete or not at all. Members are looked up by name and written under names of ours,
    so that no path inside the archive is ever followed.

    Raises:
        OSError, http.client.HTTPException: no network, no answer, no space, or no permission to write.
        ValueError: the archive has another checksum than expected, or lacks a file.
    """
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder}.", dir=root) as temporary:
            archive = Path(temporary) / "archive.tar.gz"
            with archive.open("wb") as stream:
                shutil.copyfileobj(answer, stream)
            with archive.open("rb") as stream:
                found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            if found != md5:
                raise ValueError(f"{url} has the MD5 {found}, expected {md5}; nothing was kept, try again")
            unpacked = Path(temporary) / folder
            unpacked.mkdir()
            _extract(archive, unpacked, [(f"{folder}/{file}", file) for file in files], url)
            try:
                unpacked.rename(root / folder)
            except OSError:  # another process was faster: its folder passed the same check
                if not all((root / folder / file).exists() for file in files):
                    raise


def _extract(archive: Path, folder: Path, members: Sequence[tuple[str, str]], url: str) -> None:
    with tarfile.open(archive, "r:gz") as content:
        regular = {member.name: member for member in content if member.isfile()}
        for name, file in members:
            stream = content.extractfile(regular[name]) if name in regular else None
            if stream is None:
                raise ValueError(f"{url} lacks the file {name}; expected the official archive")
            with stream, (folder / file).open("wb") as target:
                shutil.copyfileobj(stream, target)

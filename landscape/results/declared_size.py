"""Reject files that declare far more content than they can hold, before memory is reserved for it, and pipes."""

import tomllib
import zlib
from pathlib import Path
from typing import Any

import h5py

MOST_BYTES = 2**26  # of one chunk, all of which is in memory while a part of it is read
# Filters whose output is bounded by the chunk, or by a small multiple of what is stored.
BOUNDED = {h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_LZF}


def expanding(dataset: h5py.h5d.DatasetID) -> str:
    """Why the chunks of a dataset must not be read, in words; "" if they may. Chunks with gzip are inflated to tell."""
    created = dataset.get_create_plist()
    if created.get_layout() != h5py.h5d.CHUNKED:
        return ""
    size = dataset.dtype.itemsize
    for side in created.get_chunk():
        size *= side
    if size > MOST_BYTES:
        return f"chunks of {size:,} bytes"
    filters = [created.get_filter(i)[0] for i in range(created.get_nfilters())]
    packed = [code for code in filters if code not in BOUNDED]
    if not packed:
        return ""
    if packed != [h5py.h5z.FILTER_DEFLATE]:
        return f"chunks of the filters {', '.join(map(str, filters))}, expected gzip alone"
    for i in range(dataset.get_num_chunks()):
        _, content = dataset.read_direct_chunk(dataset.get_chunk_info(i).chunk_offset)
        inflater = zlib.decompressobj()
        if len(inflater.decompress(content, size + 1)) > size:
            return "a compressed chunk that is larger than it says"
    return ""


EXPANSION = 16  # largest allowed ratio of content to its file: shared, compressed or never written values
SLACK = 2**26  # bytes below which the ratio does not matter


def refuse_oversized(
    file: str, what: str, declared: int, held: int, *, expansion: int = 1, slack: int = 0, unit: str = "bytes"
) -> None:
    """Refuse content that is larger than `expansion` times what holds it, plus `slack`.

    Raises:
        ValueError: it is; the message starts with `file`.
    """
    if declared > expansion * held + slack:
        raise ValueError(f"{file} declares {what} of {declared:,} {unit} in a file of {held:,} {unit}; refused")


def refuse_special(path: Path) -> None:
    """Refuse a pipe or a device, on which reading may wait for ever. Raises ValueError: it is one."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is neither a file nor a folder; give a regular file")


MOST_TOML, MOST_DOTS = 2**16, 1000  # bytes of such a file, and dots in a line of it: keys of many parts take minutes


def toml_of(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ValueError: it is none, or larger than one that somebody writes; "it ..."."""
    if (size := path.stat().st_size) > MOST_TOML:
        raise ValueError(f"it has {size:,} bytes, expected at most {MOST_TOML:,}")
    try:
        text = path.read_text()
        if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
            raise ValueError(f"it has a line of more than {MOST_DOTS:,} dots")
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not a TOML file ({error})") from None

"""Decode pictures with Pillow, in several threads, into one uint8 array in memory."""

import io
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np
from PIL import Image

from landscape.data import memory
from landscape.data.preprocessing import Resize, rgb

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SMALL = 64  # images up to this side keep their size
DEFAULT_SIZE = 224
CHUNK = 16  # pictures per task, enough that scheduling costs nothing
PIXEL_BYTES = 8  # of a pixel as it is stored, as RGB and while it is resized
REPORT_SECONDS = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Picture:
    """An encoded picture and its row in the array."""

    row: int
    source: str | bytes  # path of its file, or the file's bytes
    name: str  # for messages


class _Room:
    """Memory for pictures that are decoded at the same time; one that needs more is decoded alone."""

    def __init__(self, most: int) -> None:
        self._most, self._used, self._changed = most, 0, threading.Condition()

    @contextmanager
    def taken(self, image: Image.Image, name: str) -> Iterator[None]:
        """Wait until there is room for the pixels of a picture, as they are stored and as RGB.

        Raises:
            memory.TooLarge: this machine never has it.
        """
        width, height = image.size
        needed = PIXEL_BYTES * width * height
        if needed > self._most and needed > memory.available():
            raise memory.TooLarge(
                f"{name} has {width:,} x {height:,} pixels, which need {memory.format_bytes(needed)} of memory, and "
                f"{memory.format_bytes(memory.available())} is free; make it smaller"
            )
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + needed <= self._most)
            self._used += needed
        try:
            yield
        finally:
            with self._changed:
                self._used -= needed
                self._changed.notify_all()


_room = _Room(2**30)


def decoded(
    pictures: Iterable[Picture],
    *,
    name: str,
    count: int,
    of: int,
    size: int,
    resize: Resize | None = None,
    threads: int | None = None,
) -> np.ndarray:
    """Pictures, one for each row 0..count-1 in any order, as one uint8 array (count, 3, size, size); see `pixels`.

    Pillow decodes and resizes without holding the interpreter's lock, so threads share the work (by default a few more
    than processors, whatever `--workers`). Only a few chunks of a lazy iterable are read ahead. `name` and `of`, the
    number of pictures they were selected from, are for messages.

    Raises:
        ValueError: the array does not fit into free memory, or a picture cannot be decoded; names it.
    """
    memory.require(name, count, 3 * size * size)
    total = memory.format_bytes(count * 3 * size * size)
    _log.debug("%s: decoding %s of %s images to %d x %d, %s", name, f"{count:,}", f"{of:,}", size, size, total)
    inputs = np.empty((count, 3, size, size), np.uint8)
    start = spoke = time.monotonic()
    done = 0
    threads = threads or min(32, (os.cpu_count() or 1) + 4)  # some wait for the disk
    pool = ThreadPoolExecutor(threads)
    try:
        for finished in _in_order(pool, inputs, resize, pictures, ahead=4 * threads):
            done += finished
            if time.monotonic() - spoke > REPORT_SECONDS:
                spoke = time.monotonic()
                _log.info("%s: %s of %s decoded, %.0f/s", name, f"{done:,}", f"{count:,}", done / (spoke - start))
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, do not start further chunks
    return inputs


def _in_order(
    pool: ThreadPoolExecutor, inputs: np.ndarray, resize: Resize | None, pictures: Iterable[Picture], *, ahead: int
) -> Iterator[int]:
    """Decode chunk by chunk, at most `ahead` at once; yields the number of pictures in each finished chunk."""
    waiting: deque[Future[int]] = deque()
    source = iter(pictures)
    while chunk := list(islice(source, CHUNK)):
        waiting.append(pool.submit(_decode, inputs, resize, chunk))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _decode(inputs: np.ndarray, resize: Resize | None, pictures: list[Picture]) -> int:
    for picture in pictures:
        with naming(picture.name), opened(picture.source, picture.name) as image, _room.taken(image, picture.name):
            inputs[picture.row] = pixels(image, inputs.shape[-1], resize)
    return len(pictures)


def pixels(image: Image.Image, size: int, resize: Resize | None = None) -> np.ndarray:
    """A picture as (3, size, size) uint8: by `resize`, or else shorter side to `size` (bilinear), centre crop."""
    if resize is not None:
        return resize.pixels(image, size)
    image = rgb(image)
    if image.size != (size, size):
        scale = size / min(image.size)
        width, height = (max(size, round(side * scale)) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.resize((width, height), Image.Resampling.BILINEAR)  # Pillow antialiases when it shrinks
        image = image.crop((left, top, left + size, top + size))
    return np.asarray(image).transpose(2, 0, 1)


def sizes(pictures: Iterable[Picture]) -> Iterator[tuple[int, int]]:
    """Width and height of pictures, read from their headers."""
    for picture in pictures:
        with opened(picture.source, picture.name) as image:
            yield image.size


def common_size(sizes: Iterable[tuple[int, int]]) -> int:
    """The side of pictures if all are square, equal and small; else 224."""
    others = iter(sizes)
    width, height = next(others, (DEFAULT_SIZE, DEFAULT_SIZE))
    alike = width == height <= SMALL and all(size == (width, height) for size in others)
    return width if alike else DEFAULT_SIZE


def opened(source: str | bytes, name: str) -> Image.Image:
    """A picture of which only the header has been read; ValueError names one that cannot be decoded.

    Whatever its name, it is of one of `FORMATS`: others, such as PostScript, would start another program.
    """
    with naming(name):
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Turn whatever a decoder raises in the block into a ValueError that begins with the name of the picture."""
    try:
        yield
    except memory.TooLarge:
        raise
    except Exception as error:  # decoders raise almost anything
        reason = str(error)
        said = reason.startswith(f"{name} ")
        raise ValueError(reason if said else f"{name} cannot be decoded ({reason}); repair or remove it") from None

"""The process of a local worker: receives work and units over a pipe, and sends every result as soon as it is known.

It ends with its parent, however that ends: the pipe is then at its end. Ctrl-C is the parent's business.
"""

import logging
import os
import pickle
import queue
import signal
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

LEAVE = b"leave "  # followed by the numbers of units that another worker measures now; heard while units are measured


@dataclass(frozen=True)
class Measure:
    """Units to measure; each result is a pair of its number and what `measured` gives."""

    units: list[tuple[int, Any]]


class Ready:
    """The worker has loaded the subject and found it to be the one that was asked for."""


class Ended:
    """All units of a `Measure` are measured or left."""


@dataclass(frozen=True)
class Failed:
    """An error, which ends the run as it does in one process."""

    error: BaseException


def main(handle: int, threads: int) -> None:
    """Serve until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("landscape").addHandler(logging.NullHandler())  # the parent said it when it loaded the same
    logging.getLogger("landscape").propagate = False
    pipe = Connection(handle)
    left: dict[int, int] = {}
    handled = 0
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, messages, left), daemon=True).start()
    import torch

    torch.set_num_threads(threads)
    work: Any = None
    subject: Any = None
    while True:
        message = pickle.loads(messages.get())  # the parent's, over a pipe that nobody else has
        handled += 1
        try:
            if isinstance(message, Measure):
                _measure(pipe, work, subject, message.units, left, handled)
                pipe.send(Ended())
            else:
                from landscape.running.work import loaded

                subject = None  # its memory is free before the next is loaded
                work, subject = message, loaded(message)
                pipe.send(Ready())
        except ConnectionError:
            os._exit(1)
        except Exception as error:
            pipe.send(Failed(picklable(error)))


def _receive(pipe: Connection, messages: queue.SimpleQueue[bytes], left: dict[int, int]) -> None:
    """Queue messages; units to leave are noted with the number of the message that they belong to.

    A unit that was left may come back later, if the worker that took it dies.
    """
    received = 0
    try:
        while True:
            content = pipe.recv_bytes()
            if content.startswith(LEAVE):
                left.update(dict.fromkeys(map(int, content[len(LEAVE) :].split()), received))
            else:
                received += 1
                messages.put(content)
    except (EOFError, OSError):
        os._exit(1)


def _measure(
    pipe: Connection, work: Any, subject: Any, units: list[tuple[int, Any]], left: dict[int, int], message: int
) -> None:
    from landscape.running.work import measured

    results = measured(work, subject, [unit for _, unit in units])
    try:
        for number, _ in units:
            if left.get(number) == message:
                break  # what was left is the end of the chunk
            pipe.send((number, next(results)))
    finally:
        results.close()


def picklable(error: Exception) -> Exception:
    """An error with its traceback as a note, or another one that says the same."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

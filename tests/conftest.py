import os
import signal
import urllib.request
from urllib.error import URLError

import pytest

# A job in the background of a shell is started with Ctrl-C ignored, and hands that on; the tests that press it need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# As the command line does: long spinning starves the threads beside any other load. Before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads fail, and data is found where a test puts it."""

    def refuse(*_: object, **__: object) -> None:
        raise URLError("tests have no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.delenv("LANDSCAPE_DATA", raising=False)

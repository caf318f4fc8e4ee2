import os
import signal

# A job in the background of a shell is started with Ctrl-C ignored, and hands that on; the tests that press it need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# As the command line does: long spinning starves the threads beside any other load. Before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

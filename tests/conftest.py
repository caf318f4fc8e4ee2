import os

# As the command line does: long spinning starves the threads beside any other load. Before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

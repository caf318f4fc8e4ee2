import os

# As the command line does: spinning threads starve each other beside any other load. Before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

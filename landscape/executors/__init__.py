"""Measure units in this process, in processes of this machine, or on the workers of a dask scheduler."""

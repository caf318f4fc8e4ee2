"""The checks of `faults.py`: a function of a folder with a checkpoint, which returns what was not as it should be."""

"""The results file: a journal per result, merged into one HDF5 file and read back as labelled arrays."""

"""Permutations of a network's units that leave its function unchanged, and the alignment of two networks by them."""

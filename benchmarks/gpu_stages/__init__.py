"""Stages of `benchmarks/gpu.py`, one per module."""

"""Measure a network while it is trained: sharpness, gradient noise and distance over the steps of a run."""

"""Which layers are measured, and the statistics of feature maps that the layer probes compute."""

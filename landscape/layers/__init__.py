"""Layer discovery, and the statistics of feature maps that the layer probes compute."""

"""Linear algebra on the weights and feature maps of a network."""

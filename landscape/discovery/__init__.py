"""Find the layers of any network from one recorded forward pass."""

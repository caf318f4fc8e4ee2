"""Load and check what is measured: a model with its weights, a fixed set of mini-batches and the loss on them."""

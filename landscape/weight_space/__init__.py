"""Directions, lines and planes in weight space, and the loss along them."""

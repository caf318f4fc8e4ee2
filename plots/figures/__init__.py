"""The figures: a module per figure, named like it."""

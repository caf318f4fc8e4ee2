"""
A whole figure from a results file
==================================

The width and the text of a journal's column, with shapes and dashes beside the colours. ``landscape surface
checkpoints/*_demo-s0/final.pt --resolution 13 --samples 256 --out demo.h5`` measured the results.
"""

import landscape.plots

surface = landscape.plots.surface("results/demo.h5", style="paper", columns=2)

# %%
# A figure names every checkpoint of the file; ``only`` chooses, and ``*`` stands for anything; ``landscape hessian
# checkpoints/*_demo-s0/final.pt --samples 256 --out demo.h5`` measured these.

spectrum = landscape.plots.hessian("results/demo.h5", only=["resnet*", "vit*"], style="paper", columns=2)

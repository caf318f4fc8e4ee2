"""
Panels of your own figure
=========================

With ``ax`` a figure is drawn into axes of yours: as many as it has panels, or a subfigure. Style, legend and
caption are then yours too. ``landscape fourier checkpoints/*_demo-s0/final.pt --out demo.h5`` and
``landscape lesion checkpoints/*_demo-s0/final.pt --out demo.h5`` measured the results.
"""

import matplotlib.pyplot as plt

import landscape.plots

page, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
landscape.plots.fourier_depth("results/demo.h5", left)
landscape.plots.lesion("results/demo.h5", right, only="vit_demo*")
left.legend(frameon=False, fontsize="small")  # the labels of the checkpoints
left.set_title("which layers filter high frequencies")
right.set_title("which units of the ViT matter")

"""
The numbers behind a figure
===========================

A results file is HDF5 that xarray opens, with units and long names. Here are the largest eigenvalues of every
mini-batch, each with its residual; ``landscape hessian checkpoints/*_demo-s0/final.pt --samples 256 --out
demo.h5`` measured them.
"""

import matplotlib.pyplot as plt

import landscape

tree = landscape.open("results/demo.h5")
page, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
for result in (node.to_dataset() for node in tree["hessian"].children.values()):
    largest = result.eigenvalue.sel(rank=0)
    axes.errorbar(result.batch, largest, result.residual.sel(rank=0), fmt=".", label=result.attrs["label"])
    interval = f"[{result.nep_low.item():.3f}, {result.nep_high.item():.3f}]"
    print(f"{result.attrs['label']:22} NEP {result.nep.item():.3f} {interval}")
axes.set_xlabel("mini-batch")
axes.set_ylabel("Hessian eigenvalue of largest magnitude")
axes.legend(frameon=False, fontsize="small")

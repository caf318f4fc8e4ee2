"""
The edge of stability
=====================

Full-batch training of a fully connected tanh network on 300 images of CIFAR-10, three seeds, followed by
``landscape.Monitor``; ``landscape reproduce --claim edge-of-stability --claim adaptive-edge`` trained and measured it.
Gradient descent moves to larger sharpness until it reaches 2 / learning rate, and stays there.
Where it gets there the loss rises between two rows, by 9 to 46 %, and the monitor announces a spike (triangles).
"""

import landscape
import landscape.plots

descent = landscape.plots.monitor("results/edge-of-stability.h5", only="gradient-descent*")

# %%
# Adam has the same edge for the sharpness that its preconditioner leaves, at (2 + 2 beta1) / ((1 - beta1) learning
# rate).

adam = landscape.plots.monitor_preconditioned("results/edge-of-stability.h5", only="full-batch-Adam*")

# %%
# The mean over the steps from where the threshold is first reached, as a share of it:

for run in landscape.open("results/edge-of-stability.h5")["monitor"].children.values():
    data = run.to_dataset()
    own = "preconditioned" if "Adam" in data.attrs["label"] else "eigenvalue"
    threshold = data["preconditioned_threshold" if own == "preconditioned" else "threshold"]
    ratio = (data[own].isel(rank=0) / threshold).dropna("step")
    reached = ratio.step >= ratio.step[ratio >= 1][0]
    print(f"{data.attrs['label']:30} {ratio[reached].mean().item():.3f}")

r"""
SGD against SAM: which is flatter?
==================================

Four seeds each of a small ResNet of CIFAR-10, trained by SGD and by SGD with sharpness-aware minimisation and measured
by one command; ``docs/sam.md`` tells the whole story:

.. code-block:: sh

    landscape study run sgd-sam --data-root DATA

The first seed of each alone suggests an answer: by all five measures SAM is flatter.
"""

import landscape
import landscape.plots

one_seed = landscape.plots.flatness("results/sgd-sam.h5", only="*-s0")

# %%
# Over seeds, every measure has a difference with its 95 % interval and a verdict, p after Holm's correction:

found = landscape.compare("results/sgd-sam.h5", group=r"-s\d+$")
for row in found.contrasts:
    if row.probe in {"flatness", "trace"}:
        change = row.difference
        interval = f"{change.value:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
        print(f"{row.number:18} {interval}  p {row.adjusted:.2g}  {row.verdict}")

# %%
# What SAM is made to lower, and the trace of the Hessian, are lower by more than the spread over seeds explains; of the
# measures that do not depend on the scale of the weights this cannot be said.

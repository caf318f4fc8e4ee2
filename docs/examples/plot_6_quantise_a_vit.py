"""
Quantise a small ViT
====================

Each layer of a vision transformer on digits rounded to 8, 6, 4, 3 and 2 bits in turn; ``landscape train vit_demo --data
digits`` trained it, ``landscape sensitivity checkpoints/vit_demo-digits/final.pt --split train --samples 512 --out
quantised-vit.h5`` measured it. The first layers need the bits. On the right, all layers together and the sum of the
single increases.
"""

import landscape
import landscape.plots
from landscape.exchange.bit_tables import bit_table

page = landscape.plots.sensitivity("results/quantised-vit.h5")

# %%
# The predictor of HAWQ-V2 takes four Hessian products per mini-batch and no evaluation. It orders the layers where the
# increases are larger than their noise, at 2 bits:

predicted = landscape.plots.sensitivity_predictor("results/quantised-vit.h5")

# %%
# Bit-widths for at most 3 bits per weight, as ``landscape show results/quantised-vit.h5 --budget 3`` prints them:

(run,) = landscape.open("results/quantised-vit.h5")["sensitivity"].children.values()
table = bit_table(run.to_dataset(), "3")
for name, bits in zip(table.names, table.bits, strict=True):
    print(f"{name:32} {bits}")
print("\n".join(table.words()))

# %%
# On the test split, where this network has a loss of 0.138 nats, the table raises the loss by 0.053 +- 0.020 and 3 bits
# for every layer by 0.130 +- 0.027: the choice pays, by 0.077 +- 0.029, but costs more than the sum of the single
# increases promises.

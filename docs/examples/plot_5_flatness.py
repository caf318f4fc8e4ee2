r"""
SGD against SAM: which is flatter?
==================================

Five seeds each of ``resnet_demo`` on a third of digits, trained by SGD and by SGD with sharpness-aware minimisation:

.. code-block:: sh

    for s in 0 1 2 3 4; do
      R="--data digits --fraction 0.3 --epochs 8 --set optimizer=sgd --set weight_decay=5e-4 --lr 0.1 --seed $s"
      landscape train resnet_demo $R --name sgd-s$s
      landscape train resnet_demo $R --name sam-s$s --sam 0.1
    done
    landscape flatness checkpoints/resnet_demo-digits-s[ga][dm]-s? --samples 256 --steps 10 --rho worst-l2=0.1 \
      --measures sam,worst-l2,adaptive-worst-l2,relative-flatness,fisher-rao --out sgd-sam.h5

The first seed of each alone suggests an answer: by the worst cases SAM is flatter by a factor of two.
"""

import landscape
import landscape.plots

one_seed = landscape.plots.flatness("results/sgd-sam.h5", only="*-s0")

# %%
# Over seeds, every measure has a difference with its 95 % interval and a verdict, p after Holm's correction:

found = landscape.compare("results/sgd-sam.h5", group=r"-s\d+$")
for row in found.contrasts:
    low, high = row.difference.low, row.difference.high
    print(f"{row.number:18} {row.difference.value:+.3f} [{low:+.3f}, {high:+.3f}]  p {row.adjusted:.2f}  {row.verdict}")

# %%
# Most values of SGD are higher, but after eight epochs and with five seeds no difference exceeds what the spread over
# seeds explains.

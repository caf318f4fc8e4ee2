r"""
Two ResNets aligned
===================

Are the minima of two seeds far apart, or do the networks only name their units differently? Four ResNets on digits
with 64 channels in the first stage, four with 16:

.. code-block:: sh

    for s in 0 1 2 3; do
      landscape train resnet_demo --data digits --epochs 12 --seed $s --model-arg width=64 --name s$s
      landscape train resnet_demo --data digits --epochs 12 --seed $s --name narrow-s$s
    done
    R=checkpoints/resnet_demo-digits O="--split test --samples all --out two-resnets.h5"
    landscape align $R-s0 $R-s1 $O
    landscape line $R-s0 $R-s1 --connect bezier --connect-epochs 5 --resolution 11 $O
    landscape barriers $R-s? --align --resolution 7 --label wide $O
    landscape barriers $R-narrow-s? --align --resolution 7 --label narrow $O
"""

import itertools

import numpy as np

import landscape
import landscape.plots

aligned = landscape.plots.align("results/two-resnets.h5")

# %%
# Solid and dash-dotted, the statistics of batch norm are interpolated like the weights: between the networks nothing
# is recognised, and aligning the units seems to make it worse. Both mislead. The activations of a mixture of two
# networks are smaller than the statistics say (Jordan et al. 2023, arXiv 2211.08403). Where these are recomputed at
# every point, the barrier of 5 nats is one of 0.33, and of 0.08 with aligned units. All pairs of the wide networks:

matrices = landscape.plots.barriers("results/two-resnets.h5", only="wide")

# %%
# What the permutation contributes is the difference in the right column. Of single pairs the errors are over test
# images (as if the two were independent); of the means over networks, by leaving out one at a time, since pairs share
# networks:

runs = landscape.open("results/two-resnets.h5")["barriers"].children
for label in ("wide", "narrow"):
    (run,) = (run for name, run in runs.items() if name.startswith(label))
    barrier, error = run["barrier_matrix"].values[1::2], run["barrier_matrix_se"].values[1::2]  # recomputed
    for i, j in itertools.combinations(range(4), 2):
        (before, after), (before_se, after_se) = barrier[:, i, j], error[:, i, j]
        print(f"{label} {i} and {j}: {before:.2f} ± {before_se:.2f}, aligned {after:.3f} ± {after_se:.3f}: "
              f"lower by {before - after:.2f} ± {np.hypot(before_se, after_se):.2f}")  # fmt: skip
    three = [*barrier, barrier[0] - barrier[1]]
    means = np.array([one.sum() / 12 for one in three])
    without = np.array([[np.delete(np.delete(one, i, 0), i, 1).sum() / 6 for one in three] for i in range(4)])
    errors = np.sqrt(3 / 4 * np.square(without - means).sum(axis=0))
    words = (f"{mean:.2f} ± {e:.2f}" for mean, e in zip(means, errors, strict=True))
    print("{} mean: {}, aligned {}: lower by {}\n".format(label, *words))

# %%
# The verdict: aligning lowers the barrier of every wide pair by more than five standard errors, on average to a fifth
# (with four networks a 95 % interval is 3.2 errors wide to each side, and excludes 0). It does not remove it: every
# aligned barrier is more than three standard errors above 0. Narrow networks keep most of theirs. So "one basin up to
# permutation" is a matter of width here, and of a search that finds a good permutation, not the best.
#
# Nor does a barrier on the straight line, aligned or not, mean that minima are separate. A curve to the second
# network as it is, with one point in between that was trained, has a barrier that cannot be told apart from that of
# the aligned line, and the accuracy of its ends:

curve = landscape.plots.line("results/two-resnets.h5")

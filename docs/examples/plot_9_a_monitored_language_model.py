"""
A training with Muon and AdamW
==============================

A GPT-2 of 0.11 M parameters learns the source code of installed packages byte by byte, in 3,000 steps of 8 sequences of
64 bytes: Muon moves the matrices of its blocks, AdamW the rest (``results/monitored_gpt2.py``, five to twenty minutes
on one core). ``landscape.Monitor`` follows it with its default settings, at most 2 % of the training time, along the
updates that both optimisers make together.
"""

import landscape
import landscape.plots

page = landscape.plots.monitor_critical("results/muon-gpt2.h5")

# %%
# What that took, of the time of the training alone. The first measurement, with eigenvalues, is made whatever it costs:

(run,) = landscape.open("results/muon-gpt2.h5")["monitor"].children.values()
data = run.to_dataset()
training, rows = float(data["training_seconds"][-1]), data["seconds"][1:]
print(f"{data.sizes['step'] - 1} rows up to step {int(data['step'][-1])}: {100 * float(rows.sum()) / training:.2f} %")
print(f"with the first measurement: {100 * float(data['seconds'].sum()) / training:.2f} %")
print(f"a row, median: {float(rows.median()) / (training / int(data['step'][-1])):.2f} training steps")

# %%
# The mini-batch that is measured is not the one that an update was made for. Where an update lowers its loss, the
# critical sharpness lies below 2 / learning rate (dashed), and there is none where already the slope rises:

for name, part in (("first", slice(1, 16)), ("last", slice(-15, None))):
    slope, change = data["predicted_change"][part], data["actual_change"][part]
    print(f"{name} 15 rows: {int((slope < 0).sum())} slopes fall, {int((change < 0).sum())} losses fell")

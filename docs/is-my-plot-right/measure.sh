#!/bin/sh
# Measures and draws the pictures of is-my-plot-right.md, in this folder; some minutes on two cores.
set -e
cd "$(dirname "$0")"
landscape train resnet_demo --data digits --epochs 12 --seed 1 --out "${RUN:=checkpoints/digits}" --quiet
surface() { rm -f "$1.h5"; landscape surface "$RUN/final.pt" --resolution 15 --samples 512 --label "$1" --out "$1.h5" --quiet $2; }
surface healthy "--range 0.5"
surface too-wide "--range 4"
surface too-narrow "--range 0.002"
surface wrong-normalisation "--range 0.5 --mean 0,0,0 --std 1,1,1"
surface train-mode "--range 0.5 --model train_mode.py:model --data digits --batch-size 16"
python draw.py

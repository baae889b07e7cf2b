#!/bin/sh
# Layer-pipelined hand-over on one GPU: two processes share it, the shape of an 8B Llama, bf16, random weights.
# One file per link speed in the folder $OUT (default: benchmarks/results). Takes about two minutes a speed.
#
#   PYTHONPATH=src:.carry OUT=somewhere sh benchmarks/overlap_gpu.sh [SPEED...]
set -eu
out=${OUT:-benchmarks/results}
[ $# -gt 0 ] || set -- 25GB/s 12.5GB/s 5GB/s
for link in "$@"; do
    name=overlap-gpu-$(echo "$link" | tr -d /)
    python -m baton bench overlap --model dummy:benchmarks/llama-8b.json --device cuda --dtype bf16 \
        --page 64 --tokens 1024,4096,16384,32768 --link "$link" --policy off,fixed:1,adaptive,cost \
        --repeat 5 --json "$out/$name.json" --png "$out/$name.png"
done

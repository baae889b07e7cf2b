#!/bin/sh
# Layer-pipelined hand-over on one GPU: two processes share it, the shape of an 8B Llama, bf16, random weights.
# Short prompts ten times, since a GPU's clock and the host's threads make them differ, long ones five times.
# Two files per link speed in the folder $OUT (default: benchmarks/results). Takes about three minutes a speed.
#
#   PYTHONPATH=src:.carry OUT=somewhere LENGTHS="short long" sh benchmarks/overlap_gpu.sh [SPEED...]
set -eu
out=${OUT:-benchmarks/results}
[ $# -gt 0 ] || set -- 25GB/s 12.5GB/s 5GB/s
for link in "$@"; do
    for length in ${LENGTHS:-short long}; do
        case $length in
        short) tokens=1024,4096 repeat=10 ;;
        long) tokens=16384,32768 repeat=5 ;;
        *) echo "LENGTHS has $length; it may have short and long" >&2 && exit 2 ;;
        esac
        name=overlap-gpu-$length-$(echo "$link" | tr -d /)
        python -m baton bench overlap --model dummy:benchmarks/llama-8b.json --device cuda --dtype bf16 \
            --page 64 --tokens $tokens --link "$link" --policy off,fixed:1,adaptive,cost \
            --repeat $repeat --json "$out/$name.json" --png "$out/$name.png"
    done
done

#!/bin/sh
# Everything that needs a GPU, in parts of under ten minutes each on one H200:
#
#   sh benchmarks/gpu.sh tests      the tests that need a GPU, decode steps, cuda_ipc copies
#   sh benchmarks/gpu.sh overlap    hand-overs beside prefill, layer pipelining off and on
#   sh benchmarks/gpu.sh serve      a deployment behind a router, in the form of the seed's report; LINK=25GB/s
#                                   or 12.5GB/s
#
# The shape of an 8B Llama, bf16, random weights; prefill and decode are two processes on one GPU. Results are
# dated JSON in $OUT (default: benchmarks/results). PYTHON names the interpreter, which needs no installed
# Baton.
set -eu
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results} python=${PYTHON:-python} day=$(date -u +%Y-%m-%d)
model=dummy:benchmarks/llama-8b.json
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"

case ${1:-} in
tests)
    $python -m pytest -q -rs tests/engine/attention tests/engine/test_decode_graphs.py \
        tests/engine/sampling/test_sampler.py tests/transport/test_shm_cuda.py \
        tests/transport/test_cuda_ipc.py tests/transport/test_packing.py
    $python benchmarks/decode_gpu.py --out "$out/decode-gpu-$day.json"
    $python benchmarks/cuda_ipc_gpu.py "$out/cuda-ipc-gpu-$day.json"
    ;;
overlap)
    for link in 25GB/s 12.5GB/s; do
        $python -m baton bench overlap --model $model --device cuda --dtype bf16 --page 64 \
            --tokens 1024,4096,16384 --link $link --policy off,cost --repeat 6 \
            --json "$out/overlap-gpu-$(echo $link | tr -d /)-$day.json"
    done
    ;;
serve)
    link=${LINK:-25GB/s}
    $python benchmarks/pipelining.py --device cuda --model $model --link "$link" \
        --json "$out/serve-gpu-$(echo "$link" | tr -d /)-$day.json"
    ;;
*)
    echo "give a part: tests, overlap or serve" >&2
    exit 2
    ;;
esac

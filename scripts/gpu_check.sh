#!/usr/bin/env bash
# Are the kernels right on this GPU, and how fast are they and a slice of Kimi-K2.5?
#
#     bash scripts/gpu_check.sh [OUT.json] [options of scripts/gpu_check.py]
#
# From this checkout, with a Python that has JAX with its CUDA plugin and this project's other
# dependencies (pip install -e ".[cuda12]"); PYTHON names one, else `python` or `python3` is taken.
# Ends within 8 minutes. OUT.json (default: gpu_check.json) is also the last line of stdout; what did
# not get time is named in it. Status 0: all right; 1: not; 2: no such GPU, or it cannot start.

set -uo pipefail
LIMIT=465
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 2
OUT=gpu_check.json
if (($#)) && [[ $1 != -* ]]; then
    OUT=$1
    shift
fi
PYTHON=${PYTHON:-$(command -v python || command -v python3)}
if [[ -z $PYTHON ]]; then
    echo "gpu_check.sh: no Python found; PYTHON=... names one" >&2
    exit 2
fi
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}

missing=$("$PYTHON" - <<'CODE'
import importlib.util
import sys

if sys.version_info < (3, 11):
    print("python>=3.11", end=" ")
names = ("jax", "flax", "jaxtyping", "numpy", "tqdm", "tiktoken", "jinja2", "safetensors",
         "huggingface_hub")
print(*(name for name in names if importlib.util.find_spec(name) is None))
CODE
) || exit 2
if [[ -n ${missing// /} ]]; then
    echo "gpu_check.sh: $PYTHON lacks $missing: pip install -e '.[cuda12]' in $ROOT" >&2
    exit 2
fi

began=$(mktemp) || exit 2
trap 'rm -f "$began"' EXIT
command=("$PYTHON" "$ROOT/scripts/gpu_check.py" --out "$OUT" "$@")
command -v timeout >/dev/null && command=(timeout -k 5 "$LIMIT" "${command[@]}")
"${command[@]}"
status=$?
if ((status == 124 || status == 137)); then
    # A file of an earlier run stays, and is not this run's.
    if [[ ! $OUT -nt $began ]]; then
        echo "gpu_check.sh: stopped after $LIMIT s before anything was measured" >&2
        echo "{\"all_right\": false, \"not_run\": [\"all: stopped after $LIMIT s\"]}"
        exit 1
    fi
    echo "gpu_check.sh: stopped after $LIMIT s in the middle of a part; $OUT has the others" >&2
    "$PYTHON" -c 'import json, sys; print(json.dumps(json.load(open(sys.argv[1]))))' "$OUT"
    exit 1
fi
exit "$status"

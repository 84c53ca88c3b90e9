#!/bin/bash
# One node of eight GPUs: four train, four generate with a vLLM server.
#   recipes/launch/four_plus_four.sh RECIPE.yaml MODEL [--key value ...]
# The recipe must have expected_processes. The server ends with the training. Not tested on a GPU.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 RECIPE.yaml MODEL [--key value ...]" >&2
    exit 2
fi
recipe=$1
model=$2
shift 2
here=$(dirname "$0")
port=${SERVER_PORT:-8000}

CUDA_VISIBLE_DEVICES=4,5,6,7 GPUS=4 PORT=$port "$here/server.sh" "$model" &
server=$!
# The training takes the place of this shell, so that it gets the signals of a scheduler; the server ends after it.
(tail --pid=$$ --follow /dev/null; kill "$server") &

# The trainer waits for the server, up to vllm_server_timeout seconds.
export CUDA_VISIBLE_DEVICES=0,1,2,3 GPUS=4
exec "$here/accelerate.sh" "$recipe" \
    --use_vllm true --vllm_mode server --vllm_server_port "$port" --keep_global_batch true "$@"

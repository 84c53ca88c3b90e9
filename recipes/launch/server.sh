#!/bin/bash
# Serve the model of a run with vLLM on a node of its own, for recipes with vllm_mode: server:
#   recipes/launch/server.sh MODEL [vLLM option ...]
# and start training with --vllm_server_host ADDRESS_OF_THIS_NODE. GPUS is the number of GPUs that share the model.
# `trl vllm-serve --model MODEL` starts the same server, but is deprecated in TRL. Not tested on a GPU.
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: $0 MODEL [vLLM option ...]" >&2
    exit 2
fi
model=$1
shift

# Development mode lets the trainer replace the weights: let nobody else reach the port.
export VLLM_SERVER_DEV_MODE=1
exec vllm serve "$model" \
    --tensor-parallel-size "${GPUS:-8}" \
    --port "${PORT:-8000}" \
    --weight-transfer-config '{"backend": "nccl"}' \
    --logprobs-mode processed_logprobs \
    --max-logprobs -1 \
    "$@"

#!/bin/bash
# Train from a recipe with torchrun, on one node or several. On node number NODE_RANK, with HEAD the address of node 0:
#   NNODES=2 NODE_RANK=0 HEAD=10.0.0.1 recipes/launch/torchrun.sh RECIPE.yaml [--key value ...]
# GPUS is the number of processes per node, PORT a free port of node 0. SHARDING is fsdp2 (default) or ddp.
# Not tested on several machines; two nodes on one CPU are a test.
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: NNODES=N NODE_RANK=K HEAD=ADDRESS $0 RECIPE.yaml [--key value ...]" >&2
    exit 2
fi
recipe=$1
shift

if [ "${SHARDING:-fsdp2}" = fsdp2 ]; then
    # What recipes/accelerate_configs/fsdp2.yaml says, which torchrun does not read.
    export ACCELERATE_USE_FSDP=true FSDP_VERSION=2 FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP
    export FSDP_RESHARD_AFTER_FORWARD=true FSDP_STATE_DICT_TYPE=FULL_STATE_DICT FSDP_CPU_RAM_EFFICIENT_LOADING=true
    export ACCELERATE_MIXED_PRECISION=${ACCELERATE_MIXED_PRECISION:-bf16}
fi

exec torchrun \
    --nnodes "${NNODES:-1}" \
    --node_rank "${NODE_RANK:-0}" \
    --nproc_per_node "${GPUS:-8}" \
    --master_addr "${HEAD:-127.0.0.1}" \
    --master_port "${PORT:-29500}" \
    -m pacs_trl.train --config "$recipe" "$@"

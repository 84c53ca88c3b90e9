#!/bin/bash
# Train from a recipe with accelerate, on one node or several. On node number NODE_RANK, with HEAD the address of node 0:
#   NNODES=2 NODE_RANK=0 HEAD=10.0.0.1 recipes/launch/accelerate.sh RECIPE.yaml [--key value ...]
# GPUS is the number of processes per node, ACCELERATE_FILE a file of recipes/accelerate_configs.
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: NNODES=N NODE_RANK=K HEAD=ADDRESS $0 RECIPE.yaml [--key value ...]" >&2
    exit 2
fi
recipe=$1
shift

nodes=${NNODES:-1}
file=fsdp2.yaml
if [ "$nodes" -gt 1 ]; then
    file=fsdp2_8x8.yaml
fi
exec accelerate launch \
    --config_file "${ACCELERATE_FILE:-recipes/accelerate_configs/$file}" \
    --num_machines "$nodes" \
    --machine_rank "${NODE_RANK:-0}" \
    --num_processes $((nodes * ${GPUS:-8})) \
    --main_process_ip "${HEAD:-127.0.0.1}" \
    --main_process_port "${PORT:-29500}" \
    -m pacs_trl.train --config "$recipe" "$@"

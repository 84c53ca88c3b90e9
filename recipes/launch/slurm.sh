#!/bin/bash
#SBATCH --job-name=pacs
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@1200
# Train from a recipe on the nodes of a Slurm job:
#   sbatch --nodes 8 recipes/launch/slurm.sh RECIPE.yaml [--key value ...]
# Before the time limit, and when the job is preempted, the run saves a checkpoint and the job is queued again; it then
# continues from its last checkpoint. With other numbers of nodes the completions of an optimizer step stay those of the
# recipe's expected_processes, which it must have. Not tested on a cluster.
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: sbatch --nodes N $0 RECIPE.yaml [--key value ...]" >&2
    exit 2
fi
recipe=$1
shift

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD NNODES="$SLURM_JOB_NUM_NODES"
# One process per GPU of the job: those of `sbatch --gpus-per-node`.
export GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}
# Seconds from SIGTERM to SIGKILL, instead of 30: an optimizer step takes longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1140

requeue() {
    # Signals the tasks, but not this shell. `srun` does not forward SIGTERM: it kills its tasks.
    scancel --signal=TERM "$SLURM_JOB_ID"
    wait
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap requeue TERM

# Each task finds its own node number, so the shell of the task expands it.
# shellcheck disable=SC2016
srun bash -c 'NODE_RANK=$SLURM_NODEID exec recipes/launch/accelerate.sh "$@"' launch "$recipe" \
    --keep_global_batch true --resume_from_checkpoint last "$@" &
wait $!

#!/bin/bash
# Two nodes of eight GPUs under Slurm: sbatch examples/trainers/slurm.sh train.py ARGUMENTS
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
set -euo pipefail

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Ranks prove with it that they belong to the job. Another one for each job.
FORETRAIN_SECRET=$(head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n')
export FORETRAIN_SECRET

srun foretrain run --nnodes "$SLURM_NNODES" --nproc 8 --rdzv-backend c10d --rdzv-endpoint "${hosts[0]}:29500" \
  --rdzv-id "$SLURM_JOB_ID" --schedule auto -- "$@"

#!/bin/sh
# Four workers on a sweep that was created, each on one node, queued again two minutes before their time is up:
#
#     sbatch scripts/cluster/slurm.sh --study=studies/gla
#     sbatch --nodes=2 scripts/cluster/slurm.sh --study=studies/gla --distributed    # every trial on two nodes
#
# `attnlab sweep --launcher=submitit` creates the study and submits the same. The folder is one that all nodes share.
#SBATCH --job-name=attnlab
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -eu
status=0
srun .venv/bin/attnlab sweep worker --stopped_status=75 "$@" || status=$?
[ "$status" != 75 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"

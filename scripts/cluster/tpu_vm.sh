#!/bin/sh
# Sweeps on a TPU VM: all its hosts run every trial together. Until the sweep is finished or the connection ends.
#
#     scripts/cluster/tpu_vm.sh TPU ZONE --config=configs/sweeps/language.py:zoo=gla --study=/shared/studies/gla
#
# After a preemption or a lost connection, give the same command again. Further TPUs join with the same command, their own
# name in it. The hosts have the repository in ~/attnlab, set up as docs/cluster.md says, and share the study's folder.
set -eu
[ $# -ge 3 ] || { echo "usage: $0 TPU ZONE --config=FILE.py[:ARG] --study=DIR [--flag=value ...]" >&2; exit 2; }
tpu=$1 zone=$2
shift 2

# The shell of the hosts reads the command once more: every word in single quotes.
words=
for word; do
    words="$words '$(printf '%s' "$word" | sed "s/'/'\\\\''/g")'"
done
exec gcloud compute tpus tpu-vm ssh "$tpu" --zone="$zone" --worker=all \
    --command="cd ~/attnlab && exec .venv/bin/attnlab sweep --distributed$words"

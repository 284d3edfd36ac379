#!/bin/sh
# Sweeps on a TPU slice of a GKE cluster through XPK: all its hosts run every trial together.
#
#     scripts/cluster/xpk.sh CLUSTER WORKLOAD v5litepod-16 IMAGE STORAGE \
#         --config=configs/sweeps/language.py:zoo=gla --study=/shared/studies/gla
#
# The image has attnlab installed in its working directory; STORAGE is a volume that `xpk storage` has attached and that
# holds the study. After a disruption the workload is started again, and goes on. Further workloads join with another name.
set -eu
[ $# -ge 7 ] || { echo "usage: $0 CLUSTER WORKLOAD TPU_TYPE IMAGE STORAGE --config=FILE.py[:ARG] --study=DIR [...]" >&2; exit 2; }
cluster=$1 workload=$2 type=$3 image=$4 storage=$5
shift 5

# The shell of the container reads the command once more: every word in single quotes.
words=
for word; do
    words="$words '$(printf '%s' "$word" | sed "s/'/'\\\\''/g")'"
done
exec xpk workload create --cluster="$cluster" --workload="$workload" --tpu-type="$type" --docker-image="$image" \
    --storage="$storage" --max-restarts=100 --restart-on-exit-codes=75 --termination-grace-period-seconds=300 \
    --command="attnlab sweep --distributed --stopped_status=75$words"

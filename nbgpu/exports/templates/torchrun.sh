#!/usr/bin/env bash
# @{program.title}, for torchrun.
# On one machine:                    bash torchrun.sh
# On several, the same on each:      HEAD=node1 bash torchrun.sh
#   HEAD is an address of one of them that the others reach. LOCAL_ADDR is this machine's own address, for
#   machines whose own name means another address than the one that the others reach.
# Started again after it was killed, it goes on from its newest checkpoint, in the same run's folder. Another
# NBGPU_JOB and ID, and run_name in @{program.file_name}, begin a new run.
set -euo pipefail
cd "$(dirname "$0")"
{% if settings.setup %}
@{settings.setup}
{% endif %}
: "${NNODES:=@{settings.min_nodes ~ ":" if settings.min_nodes is not none}@{settings.nodes}}" "${NPROC:=@{program.ranks_per_node}}" "${HEAD:=127.0.0.1}" "${PORT:=29400}" "${ID:=@{program.name}}"
: "${MAX_RESTARTS:=@{settings.max_restarts}}" "${LOCAL_ADDR:=}"
export NBGPU_JOB="$ID" OMP_NUM_THREADS="${OMP_NUM_THREADS:-@{threads}}"
# torchrun would keep one store for all its restarts, in which the ranks find the addresses of ended ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
{% if settings.interface %}
export GLOO_SOCKET_IFNAME=@{settings.interface} NCCL_SOCKET_IFNAME=@{settings.interface}
{% endif %}
# No --node-rank: with the rendezvous c10d torchrun numbers the machines itself. Its stores listen on every
# interface of the head, with no password: run it where strangers cannot reach that port.
exec torchrun --nnodes="$NNODES" --nproc-per-node="$NPROC" --max-restarts="$MAX_RESTARTS" \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD:$PORT" --rdzv-id="$ID" ${LOCAL_ADDR:+--local-addr="$LOCAL_ADDR"} \
    @{command}

#!/usr/bin/env bash
# Two nodes on one machine, joined by an Ethernet link of a rate of your choice: two network namespaces and a
# shaped pair of virtual devices. Needs root, ip and tc. Without GPUs the ranks talk over gloo, else over NCCL.
#   scripts/two_nodes.sh up 200mbit                          (10gbit: BURST=10m)
#   scripts/two_nodes.sh run pretrain_gpt.py <flags>       RANKS=n a node (default 1)
#   scripts/two_nodes.sh down
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
up)
    ip link add taco1 type veth peer name taco2
    for node in 1 2; do
        ip netns add taco$node
        ip link set taco$node netns taco$node
        ip -n taco$node addr add 10.77.0.$node/24 dev taco$node
        ip -n taco$node link set taco$node up
        ip -n taco$node link set lo up
        ip netns exec taco$node tc qdisc add dev taco$node root tbf rate "$2" burst "${BURST:-256k}" latency 50ms
    done
    ;;
run)
    shift
    python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
    nodes=()
    trap 'kill "${nodes[@]}" 2>/dev/null || true' EXIT
    for node in 2 1; do
        first=$(((node - 1) * ${RANKS:-1}))
        devices=$(seq -s, $first $((first + ${RANKS:-1} - 1)))
        ip netns exec taco$node env CUDA_VISIBLE_DEVICES="$devices" NCCL_HOSTID=node$node NCCL_IB_DISABLE=1 \
            NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=taco$node GLOO_SOCKET_IFNAME=taco$node \
            "$python" -m torch.distributed.run --nnodes 2 --node-rank $((node - 1)) --nproc-per-node "${RANKS:-1}" \
            --master-addr 10.77.0.1 --master-port "${PORT:-29511}" "$@" &
        nodes+=($!)
    done
    wait "${nodes[0]}" && wait "${nodes[1]}"
    ;;
down)
    for node in 1 2; do ip netns del taco$node; done
    ;;
*) sed -n '2,6s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac

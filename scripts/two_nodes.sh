#!/usr/bin/env bash
# Runs a script on two nodes of one machine, joined by an Ethernet link of a rate of your choice: two network
# namespaces and a shaped pair of virtual devices. Needs root, ip and tc. GPUs talk over NCCL, CPUs over gloo.
#   scripts/two_nodes.sh 200mbit pretrain_gpt.py <flags>       RANKS=n a node (default 1)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ "${1:-}" =~ ^[1-9][0-9]*[mg]bit$ && -n "${2:-}" ]] || { sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 2; }
for tool in ip tc; do command -v $tool >/dev/null || { echo "error: $tool is missing; install iproute2" >&2; exit 1; }; done
[ "$EUID" = 0 ] || { echo "error: network namespaces need root; start this with sudo" >&2; exit 1; }
rate=$1 ranks=${RANKS:-1} burst=256k nodes=() && shift
[[ $rate == *gbit ]] && burst=${rate%gbit}m
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
finish() {
    trap '' INT TERM  # a second Ctrl-C leaves nothing behind
    { kill "${nodes[@]}" && wait; ip link del taco1.$$; } 2>/dev/null || true  # its pair: where no namespace holds it
    for node in 1 2; do ip netns del taco$node.$$ 2>/dev/null || true; done
}
trap finish EXIT
trap 'exit 143' INT TERM
ip link add taco1.$$ type veth peer name taco2.$$
for node in 1 2; do
    ip netns add taco$node.$$
    ip link set taco$node.$$ netns taco$node.$$
    ip -n taco$node.$$ addr add 10.77.0.$node/24 dev taco$node.$$
    for device in taco$node.$$ lo; do ip -n taco$node.$$ link set $device up; done
    ip netns exec taco$node.$$ tc qdisc add dev taco$node.$$ root tbf rate "$rate" burst $burst latency 50ms
done
for node in 2 1; do
    all=${CUDA_VISIBLE_DEVICES-$(seq -s, 0 $((2 * ranks - 1)))}
    devices=$(cut -d, -f$(((node - 1) * ranks + 1))-$((node * ranks)) <<<"$all")
    ip netns exec taco$node.$$ env CUDA_VISIBLE_DEVICES="$devices" NCCL_HOSTID=node$node NCCL_IB_DISABLE=1 \
        NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=taco$node.$$ GLOO_SOCKET_IFNAME=taco$node.$$ \
        "$python" -m torch.distributed.run --nnodes 2 --node-rank $((node - 1)) --nproc-per-node "$ranks" \
        --master-addr 10.77.0.1 --master-port 29511 "$@" &
    nodes+=($!)
done
wait "${nodes[0]}" && wait "${nodes[1]}"

#!/usr/bin/env bash
# Runs a script on two nodes of one machine, joined by an Ethernet link of a rate, and a delay each way, of your choice: two network
# namespaces and a shaped pair of virtual devices. Needs root, ip and tc. GPUs talk over NCCL, CPUs over gloo.
#   scripts/two_nodes.sh 200mbit pretrain_gpt.py <flags>         RANKS=n a node (default 1)
#   scripts/two_nodes.sh 50mbit 30ms pretrain_gpt.py <flags>     the delay by netem, or where the kernel has none by scripts/_delay.py
#   DATA_CENTRES=1 scripts/two_nodes.sh ...                      each node is a data centre: a job of its own, with --data-centres 2 and
#                                                                the other flags by which they meet
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
delay=
if [[ "${2:-}" =~ ^[1-9][0-9]*ms$ ]]; then
    delay=${2%ms}
    set -- "$1" "${@:3}"
fi
if [[ ! "${1:-}" =~ ^[1-9][0-9]*[mg]bit$ || -z "${2:-}" ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" # the lines above
    exit 2
fi
for tool in ip tc; do
    if ! command -v "$tool" >/dev/null; then
        echo "error: $tool is missing; install iproute2" >&2
        exit 1
    fi
done
if [ "$EUID" != 0 ]; then
    echo "error: network namespaces need root; start this with sudo" >&2
    exit 1
fi

rate=$1
shift
ranks=${RANKS:-1}
# What the shaper lets through at once: enough for a timer tick at this rate.
burst=256k
if [[ $rate == *gbit ]]; then
    burst=${rate%gbit}m
fi
python=${PYTHON:-}
if [ -z "$python" ] && [ -x .venv/bin/python ]; then
    python=.venv/bin/python
fi
: "${python:=python3}"
nodes=() # the process of each node
cable=   # the process of scripts/_delay.py

finish() {
    trap '' INT TERM # a second Ctrl-C leaves nothing behind
    {
        kill "${nodes[@]}" && wait "${nodes[@]}"
        kill $cable       # its devices go with it
        ip link del taco1.$$ # its pair goes too; only needed where no namespace holds it
    } 2>/dev/null || true
    for node in 1 2; do
        ip netns del taco$node.$$ 2>/dev/null || true
    done
}
trap finish EXIT
trap 'exit 143' INT TERM

# A cable: what goes in at taco1 comes out at taco2. $$ keeps two runs apart.
netem=
if [ -n "$delay" ]; then
    ip link add taco1.$$ type veth peer name taco2.$$
    if tc qdisc add dev taco1.$$ root netem delay 1ms 2>/dev/null; then
        tc qdisc del dev taco1.$$ root
        netem=1
    else
        ip link del taco1.$$
        exec {ready}< <(exec "$python" scripts/_delay.py taco1.$$ taco2.$$ "$delay")
        cable=$!
        read -r -u "$ready"
    fi
else
    ip link add taco1.$$ type veth peer name taco2.$$
fi
for node in 1 2; do
    ip netns add taco$node.$$
    ip link set taco$node.$$ netns taco$node.$$
    ip -n taco$node.$$ addr add 10.77.0.$node/24 dev taco$node.$$
    for device in taco$node.$$ lo; do
        ip -n taco$node.$$ link set $device up
    done
    # Each end shapes what it sends, so both directions have the rate.
    shape=(ip netns exec taco$node.$$ tc qdisc add dev taco$node.$$)
    "${shape[@]}" root handle 1: tbf rate "$rate" burst "$burst" latency 50ms
    if [ -n "$netem" ]; then
        "${shape[@]}" parent 1:1 handle 2: netem delay "${delay}ms" limit 100000
    fi
done

# Node 1 has the first half of the GPUs, node 2 the second.
all=${CUDA_VISIBLE_DEVICES-$(seq -s, 0 $((2 * ranks - 1)))}
for node in 2 1; do
    devices=$(cut -d, -f$(((node - 1) * ranks + 1))-$((node * ranks)) <<<"$all")
    job=(--nnodes 2 --node-rank $((node - 1)) --master-addr 10.77.0.1 --master-port 29511)
    meeting=()
    if [ -n "${DATA_CENTRES:-}" ]; then
        job=(--nnodes 1 --master-addr 127.0.0.1 --master-port 29511)
        meeting=(--data-centres 2 --data-centre-rank $((node - 1)) --outer-address 10.77.0.1:29512)
    fi
    # NCCL_HOSTID: NCCL believes in two hosts. The DISABLEs: it has no way around the link.
    ip netns exec taco$node.$$ env CUDA_VISIBLE_DEVICES="$devices" NCCL_HOSTID=node$node NCCL_IB_DISABLE=1 \
        NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=taco$node.$$ GLOO_SOCKET_IFNAME=taco$node.$$ \
        "$python" -m torch.distributed.run "${job[@]}" --nproc-per-node "$ranks" "$@" "${meeting[@]}" &
    nodes+=($!)
done
wait "${nodes[0]}"
wait "${nodes[1]}"

# For the .sbatch files: runs a launch script once a node, and goes on where it stopped.
#
# `--signal=B:TERM@300` sends SIGTERM to the batch script 300 seconds before the time is up (give a large model
# more to save: `sbatch --signal=B:TERM@900`), and before a preemption where PreemptParameters has
# send_user_signal. The signal goes on to every process of the run; --exit-signal-handler makes Megatron save
# after the iteration and leave, and the job is queued again. It loads its newest checkpoint, as the launch
# scripts name one folder to save to and to load from. After the failure of a node SLURM queues it by itself.

run_on_every_node() { # script, its arguments
    local hosts signals=0 seen=-1 status=0 step
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export MASTER_ADDR=${hosts[0]}
    export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
    export NNODES=$SLURM_JOB_NUM_NODES
    export GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
    # torchrun would give the ranks 30 seconds after SIGTERM: here it ignores the signal, and the ranks handle it.
    export PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT

    trap 'signals=$((signals + 1)); kill -TERM "$step" || true' TERM
    # One task a node; torchrun starts the processes of that node. A node that fails ends the job.
    # shellcheck disable=SC2016
    srun --kill-on-bad-exit=1 bash -c 'trap "" TERM; NODE_RANK=$SLURM_NODEID exec "$@"' run_on_a_node \
        "$@" --exit-signal-handler &
    step=$!
    while [ "$seen" != "$signals" ]; do # a signal ends the wait before the run has ended
        seen=$signals status=0
        wait "$step" || status=$?
    done
    if [ "$signals" != 0 ] && [ "$status" = 0 ]; then
        echo "slurm: saved before the time was up; queued again"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$status"
}

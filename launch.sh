#!/usr/bin/env bash
#
# Set up this folder's .venv, then test or launch.  ./launch.sh --help

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
    cat << 'END'
Usage (from anywhere; paths are relative to the folder of this file):

  ./launch.sh                               set up, then train the default on this machine's devices
  ./launch.sh train_mmdit.py [--flag …]     set up, then launch a script; --help lists its flags
  ./launch.sh -m tools.sample [--flag …]    set up, then run a tool in one process
  ./launch.sh slurm [--nodes 4 …] train_mmdit.py [--flag …]           write and submit a Slurm job
  ./launch.sh k8s [--nodes 4 …] train_mmdit.py [--flag …] > job.yaml  write a Kubernetes job
  ./launch.sh test [pytest argument …]      set up with the test packages, then run all tests
  ./launch.sh test-deploy [argument …]      likewise those that need a real Slurm, several hosts, Prometheus or a
                                            browser: as root on Debian or Ubuntu it installs what is missing of
                                            tests/deploy/packages.txt; what cannot run is skipped and says why
  ./launch.sh setup                         set up with the test packages, nothing else

Set-up makes .venv and installs requirements.txt; it is skipped until a requirements file or the Python
version changes.  The same launch command again resumes the run.

Variables:
  PYTHON          interpreter for .venv, 3.11 or 3.12    (default: the first one found)
  NGPU            processes on this machine              (default: one a GPU; without a GPU 2, on one core 1)
  NNODES          machines, or MIN:MAX                   (default: 1)
  RDZV_ENDPOINT   HOST:PORT where several machines meet  (HOST is one of them, PORT is free there)
  NODE_RANK       0 on the machine that is HOST, another number elsewhere  (default: found by HOST's address)
  RDZV_CONF       more of torchrun's --rdzv_conf, such as keep_alive_interval=1,keep_alive_max_attempt=3
  OMP_NUM_THREADS threads a process                      (default: so that all processes share the cores)
  MAX_RESTARTS    starts after a fault, in a row without a newer checkpoint  (default: 3; 0 = none)

Four machines of eight GPUs, on each of them:
  NNODES=4 RDZV_ENDPOINT=node0:29400 ./launch.sh train_mmdit.py --tp 4 --run_folder /shared/runs/a
which is, apart from the set-up,
  torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=node0:29400 train_mmdit.py …
or, where a scheduler starts the machines (./launch.sh slurm --help, ./launch.sh k8s --help, docs/cluster.md),
  ./launch.sh slurm --nodes 4 --gpus 8 --time 24:00:00 train_mmdit.py --tp 4 --run_folder /shared/runs/a
END
}

die() {
    echo "error: $*" >&2
    exit 2
}

# ---- Set-up ----------------------------------------------------------------------------------------------------------
# .venv/installed exists only after a complete installation: it holds the Python version and a copy of each
# requirements file that was installed.

python_version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null
}

is_usable() {
    # Runs it: a version manager's shim may exist for a version that is not there.
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' &> /dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.11 python3 python; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
        [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON is not a Python 3.11 or 3.12 with the venv module"
    done
    die "no Python 3.11 or 3.12 with the venv module found (on Debian and Ubuntu: apt-get install python3-venv);" \
        "install one, or name one: PYTHON=/path/to/python3.12 ./launch.sh"
}

is_right_python() {
    [[ -e .venv/installed/python && $(python_version .venv/bin/python) == "$(< .venv/installed/python)" ]] || return 1
    [[ -z ${PYTHON:-} || $(python_version "$PYTHON") == "$(< .venv/installed/python)" ]]
}

is_set_up() {
    local file
    is_right_python || return 1
    for file in "$@"; do
        cmp -s "$file" ".venv/installed/$file" || return 1
    done
}

install() {
    local python file options=(--disable-pip-version-check)
    if ! is_right_python; then
        python=$(find_python)
        echo "setting up .venv with Python $(python_version "$python"): a minute or two, longer for CUDA packages" >&2
        rm -rf .venv
        "$python" -m venv .venv
    else
        echo "updating .venv" >&2
        rm -rf .venv/installed
    fi
    [[ -t 1 ]] || options+=(--quiet)
    for file in "$@"; do
        options+=(--requirement "$file")
    done
    .venv/bin/python -m pip install "${options[@]}"
    mkdir -p .venv/installed.tmp
    cp "$@" .venv/installed.tmp/
    python_version .venv/bin/python > .venv/installed.tmp/python
    mv .venv/installed.tmp .venv/installed
}

set_up() {
    if is_set_up "$@"; then
        return
    fi
    mkdir -p .cache
    (
        flock 9 # a second launch waits here, then finds the work done
        if ! is_set_up "$@"; then
            install "$@"
        fi
    ) 9> .cache/setup.lock
}

# Debian's packages for the tests of deployments; without them those tests are skipped.
install_packages() {
    local package policy=/usr/sbin/policy-rc.d missing=()
    while read -r package; do
        [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2> /dev/null) == installed ]] ||
            missing+=("$package")
    done < <(grep -v '^#' tests/deploy/packages.txt)
    ((${#missing[@]})) || return 0
    echo "installing ${missing[*]}" >&2
    mkdir -p .cache
    (
        if [[ ! -e $policy ]]; then # the tests start daemons of their own; the packages' services stay off
            trap 'rm -f "$policy"' EXIT
            printf '#!/bin/sh\nexit 101\n' > "$policy"
            chmod +x "$policy"
        fi
        apt-get update
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
    ) > .cache/packages.log 2>&1 < /dev/null ||
        echo "apt-get failed, see .cache/packages.log: tests that need ${missing[*]} will be skipped" >&2
}

# ---- Devices ---------------------------------------------------------------------------------------------------------

count_gpus() {
    # PyTorch's count respects CUDA_VISIBLE_DEVICES, but takes seconds; without a driver it is 0.
    if command -v nvidia-smi > /dev/null; then
        .venv/bin/python -c 'import torch; print(torch.cuda.device_count())'
    else
        echo 0
    fi
}

count_cores() {
    local cores quota period
    cores=$(env --unset=OMP_NUM_THREADS --unset=OMP_THREAD_LIMIT nproc) # nproc would report those instead
    if read -r quota period 2> /dev/null < /sys/fs/cgroup/cpu.max && [[ $quota != max ]]; then
        quota=$((quota / period)) # a container's share of the cores
        ((quota < 1)) && quota=1
        ((quota < cores)) && cores=$quota
    fi
    echo "$cores"
}

# ---- Launch ----------------------------------------------------------------------------------------------------------

launch() {
    local gpus cores nodes=${NNODES:-1} rendezvous conf
    [[ -f $1 ]] || die "no script $1 in $PWD; ./launch.sh --help"
    cores=$(count_cores)
    if [[ -z ${NGPU:-} ]]; then
        gpus=$(count_gpus)
        NGPU=$((gpus > 0 ? gpus : cores > 1 ? 2 : 1))
    fi
    [[ $NGPU =~ ^[1-9][0-9]*$ ]] || die "NGPU must be a number of processes, at least 1, got '$NGPU'"
    [[ $nodes =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || die "NNODES must be a number of machines or MIN:MAX, got '$nodes'"
    if [[ $nodes == *:* ]] && ((${nodes%:*} > ${nodes#*:})); then
        die "NNODES=$nodes: MIN is more than MAX"
    fi
    [[ ${NODE_RANK:-0} =~ ^(0|[1-9][0-9]*)$ ]] || die "NODE_RANK must be the machine's number, from 0 on, got '$NODE_RANK'"
    [[ ${MAX_RESTARTS:=3} =~ ^[0-9]+$ ]] || die "MAX_RESTARTS must be a number of restarts, got '$MAX_RESTARTS'"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NGPU ? cores / NGPU : 1))}
    # Without GPUs every step faults the memory of its large tensors in again; in huge pages that costs a tenth less time.
    command -v nvidia-smi > /dev/null || export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}

    if [[ $nodes == 1 ]]; then
        # Port 0: the rendezvous takes a free port and keeps it, so launches side by side never meet.
        rendezvous=(--rdzv_endpoint=127.0.0.1:0 --local_addr=127.0.0.1)
        # Whatever the host name resolves to, the ranks of one machine talk over loopback.
        [[ $(uname) != Linux ]] || export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
    else
        [[ -n ${RDZV_ENDPOINT:-} ]] || die "NNODES=$nodes needs RDZV_ENDPOINT=HOST:PORT, the same on every machine"
        rendezvous=(--rdzv_endpoint="$RDZV_ENDPOINT")
        conf=${RDZV_CONF:-}
        [[ -z ${NODE_RANK:-} ]] || conf="is_host=$((NODE_RANK == 0))${conf:+,$conf}"
        [[ -z $conf ]] || rendezvous+=(--rdzv_conf="$conf")
        # Otherwise the ranks share the rendezvous' store, and a restart after a crash or a lost host finds it
        # stale: every recovery tried with torch 2.13 failed, with this every one worked.
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    fi
    trap '' USR1 # "save and stop": until the launcher has its own handler it would die of it
    # torchrun, with rules for when to start again and without a traceback of its own.
    exec .venv/bin/python -m utils.torchrun --nnodes="$nodes" --nproc_per_node="$NGPU" \
        --max_restarts="$MAX_RESTARTS" --rdzv_backend=c10d "${rendezvous[@]}" "$@"
}

# ---- Command line ----------------------------------------------------------------------------------------------------

case ${1:-} in
    -h | --help | help)
        usage
        ;;
    setup)
        set_up requirements.txt requirements-dev.txt
        ;;
    test)
        set_up requirements.txt requirements-dev.txt
        exec .venv/bin/python -m pytest "${@:2}"
        ;;
    test-deploy)
        set_up requirements.txt requirements-dev.txt
        if ((EUID == 0)) && command -v apt-get > /dev/null; then
            install_packages
        fi
        exec .venv/bin/python -m pytest -m deploy -rs tests/deploy "${@:2}"
        ;;
    slurm)
        set_up requirements.txt >&2
        exec .venv/bin/python -m tools.slurm "${@:2}"
        ;;
    k8s)
        set_up requirements.txt >&2
        exec .venv/bin/python -m tools.kubernetes "${@:2}"
        ;;
    -m)
        [[ -n ${2:-} ]] || die "-m needs a module, such as tools.sample"
        set_up requirements.txt
        exec .venv/bin/python "$@"
        ;;
    "")
        set_up requirements.txt
        # The default model is tiny: copies of it only sum gradients, shards of it also gather weights (docs/notes.md).
        launch train_mmdit.py --dp_replicate=-1 --dp_shard=1
        ;;
    *.py)
        set_up requirements.txt
        launch "$@"
        ;;
    *)
        die "do not know '$1'; give a script.py, -m MODULE, slurm, k8s, test, test-deploy, setup or nothing;" \
            "./launch.sh --help"
        ;;
esac

#!/usr/bin/env bash
# A real Slurm of several nodes on this one machine: for development and CI. As root; no systemd, no cgroup, no docker.
#
#   bash slurm/dev_cluster.sh install [--acct]   install the missing Debian packages (up does it too)
#   bash slurm/dev_cluster.sh up [--acct]        install what is missing, start, wait until every node is idle;
#                                                --acct: with accounting (slurmdbd, MariaDB), so that sacct answers
#   eval "$(bash slurm/dev_cluster.sh env)"      point srun, sbatch, squeue of this shell at it
#   bash slurm/dev_cluster.sh status             nodes and jobs
#   bash slurm/dev_cluster.sh kill-node cell2    lose a node: its slurmd, its steps and their processes are killed
#   bash slurm/dev_cluster.sh start-node cell2   bring it back
#   bash slurm/dev_cluster.sh down [--purge]     stop all that `up` started; --purge removes the folder with its logs too
#
# Settings (environment): GYRE_SLURM_ROOT folder (/tmp/gyre-slurm), GYRE_SLURM_NODES (4), GYRE_SLURM_CPUS and
# GYRE_SLURM_MEM in MiB per node as told to Slurm, not as the machine has (8, 4096), GYRE_SLURM_GPUS fake devices
# per node (4), GYRE_SLURM_PORT first of NODES+2 ports (17000). Two clusters need two roots and two port ranges.
# Everything listens on loopback only, the database on a socket in the folder. Every verb may be called again at any time.
set -euo pipefail

root=${GYRE_SLURM_ROOT:-/tmp/gyre-slurm}
nodes=${GYRE_SLURM_NODES:-4}
cpus=${GYRE_SLURM_CPUS:-8}
mem=${GYRE_SLURM_MEM:-4096}
gpus=${GYRE_SLURM_GPUS:-4}
port=${GYRE_SLURM_PORT:-17000}
host=$(hostname -s)
export SLURM_CONF=$root/etc/slurm.conf

say() { printf '%s\n' "$*" >&2; }
die() { say "dev_cluster: $*"; exit 1; }
node_names() { local index; for ((index = 0; index < nodes; index++)); do echo "cell$index"; done; }
pid_in() { [[ -s $1 ]] && cat "$1" 2>/dev/null; }
runs() { # PIDFILE: the daemon it is named after lives; the file of one that crashed may name a stranger
    local pid name=${1##*/}
    pid=$(pid_in "$1") && [[ $(readlink "/proc/$pid/exe") == */"${name%%.*}"* ]] &&
        grep -qsF "$root/" "/proc/$pid/cmdline" "/proc/$pid/environ"
}

begin() { # PIDFILE COMMAND...: start a daemon; on a loaded machine one has been seen to end of SIGPIPE as it started
    local file=$1 tries status=0; shift
    for tries in 1 2 3; do
        "$@" && return || status=$?
        until_true 5 runs "$file" && return
    done
    die "$1 ended with $status; logs are in $root/log"
}

until_true() { # SECONDS COMMAND...: retry until it succeeds; fails when the time is over
    local deadline=$((SECONDS + $1)); shift
    until "$@"; do ((SECONDS < deadline)) || return 1; sleep 0.1; done
}

install_packages() { # libpmix2 is loaded by Slurm's mpi/pmix plugin but no package depends on it
    ((EUID == 0)) || die "needs root (it installs packages and starts slurmd): use sudo"
    local missing=() package policy=/usr/sbin/policy-rc.d made= wanted=(slurmctld slurmd slurm-client munge libpmix2)
    [[ -z $acct ]] || wanted+=(slurmdbd mariadb-server)
    for package in "${wanted[@]}"; do
        [[ $(dpkg-query -W -f='${Status}' "$package" 2>/dev/null) == *' installed' ]] || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    say "installing ${missing[*]}"
    if [[ ! -e $policy ]]; then # no package may start a daemon of its own
        printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod 755 "$policy"; made=1
    fi
    local done_=0
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null || done_=$?
    [[ -z $made ]] || rm -f "$policy"
    ((done_ == 0)) || die "apt-get failed; install ${missing[*]} by hand"
}

make_folders() {
    local node index device
    mkdir -p "$root"/{etc,log,run,state,munge,gpu}
    chmod 755 "$root"; chmod 700 "$root/munge"
    [[ -s $root/munge/key ]] || (umask 077; head -c 1024 /dev/urandom >"$root/munge/key")
    for node in $(node_names); do
        mkdir -p "$root/spool/$node" "$root/tmp/$node"
        for ((index = 0; index < gpus; index++)); do # Slurm insists on character devices
            device=$root/gpu/$node-$index
            [[ -c $device ]] || mknod "$device" c 1 3
        done
    done
}

write_config() {
    cat >"$root/etc/slurm.conf" <<CONF
ClusterName=gyre
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
# Loopback only.
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
# A short-lived credential also shortens the hold of a requeued job (2 minutes by default).
AuthType=auth/munge
AuthInfo=socket=$root/munge/socket,cred_expire=10
CredType=cred/munge
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool/%n
# Per node: PMIx makes one folder per step here, and the nodes share one machine.
TmpFS=$root/tmp/%n
SlurmctldPidFile=$root/run/slurmctld.pid
SlurmdPidFile=$root/run/slurmd.%n.pid
SlurmctldLogFile=$root/log/slurmctld.log
SlurmdLogFile=$root/log/slurmd.%n.log
# Neither systemd nor cgroups.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,bf_resolution=1,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# Nodes may be larger than the machine.
SlurmdParameters=config_overrides
GresTypes=gpu
# Failures are noticed within seconds.
SlurmdTimeout=10
KillWait=5
UnkillableStepTimeout=120
ReturnToService=2
JobRequeue=1
RequeueExit=75
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
$(accounting_lines)
JobCompType=jobcomp/none
PropagateResourceLimitsExcept=MEMLOCK
$(node_lines)
PartitionName=debug   Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=preempt Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
CONF
    : >"$root/etc/gres.conf"
    ((gpus == 0)) || gres_lines >"$root/etc/gres.conf"
    echo "CgroupPlugin=cgroup/v1" >"$root/etc/cgroup.conf"
    if [[ -n $acct ]]; then write_database_config; fi
}

accounting_lines() {
    if [[ -z $acct ]]; then echo "AccountingStorageType=accounting_storage/none"; return; fi
    cat <<CONF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((port + 1 + nodes))
# sacct and sacctmgr ignore AuthInfo.
AccountingStoragePass=$root/munge/socket
AccountingStorageTRES=gres/gpu
CONF
}

write_database_config() {
    (umask 077; cat >"$root/etc/slurmdbd.conf") <<CONF
AuthType=auth/munge
AuthInfo=socket=$root/munge/socket,cred_expire=10
DbdHost=$host
DbdAddr=127.0.0.1
CommunicationParameters=NoInAddrAny
DbdPort=$((port + 1 + nodes))
SlurmUser=root
LogFile=$root/log/slurmdbd.log
PidFile=$root/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
CONF
}

node_lines() {
    local index gres=
    ((gpus == 0)) || gres="Gres=gpu:$gpus"
    for ((index = 0; index < nodes; index++)); do
        echo "NodeName=cell$index NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1 + index)) CPUs=$cpus" \
            "Sockets=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=$mem $gres State=UNKNOWN"
    done
}

gres_lines() {
    local node
    for node in $(node_names); do echo "NodeName=$node Name=gpu File=$root/gpu/$node-[0-$((gpus - 1))]"; done
}

start_munge() {
    runs "$root/run/munged.pid" && return
    rm -f "$root"/munge/socket*
    begin "$root/run/munged.pid" munged --force --key-file="$root/munge/key" --socket="$root/munge/socket" \
        --pid-file="$root/run/munged.pid" --log-file="$root/log/munged.log" --seed-file="$root/munge/seed" --num-threads=2
}

start_accounting() {
    start_database
    # slurmdbd has no key for the database's socket; its client library obeys this variable.
    runs "$root/run/slurmdbd.pid" || MYSQL_UNIX_PORT=$root/run/mariadb.socket begin "$root/run/slurmdbd.pid" slurmdbd
    until_true 60 sees_accounts || die "slurmdbd does not answer; logs are in $root/log"
    sacctmgr -i add cluster gyre >/dev/null 2>&1 || true # it may know it already, and the next two
    sacctmgr -i add account gyre cluster=gyre >/dev/null 2>&1 || true
    sacctmgr -i add user root account=gyre >/dev/null 2>&1 || true
}
sees_accounts() { timeout 3 sacctmgr -n -P show cluster >/dev/null 2>&1; }
sql() { mariadb --no-defaults -uroot --socket="$root/run/mariadb.socket" -e "$1" >/dev/null 2>&1; }

start_database() {
    runs "$root/run/mariadb.pid" && return
    if [[ ! -d $root/db/mysql ]]; then
        rm -rf "$root/db" # left half made
        mariadb-install-db --no-defaults --user=root --datadir="$root/db" --skip-test-db \
            --auth-root-authentication-method=normal >"$root/log/mariadb.log" 2>&1 || die "see $root/log/mariadb.log"
    fi
    rm -f "$root"/run/mariadb.*
    setsid mariadbd --no-defaults --user=root --datadir="$root/db" --socket="$root/run/mariadb.socket" --skip-networking \
        --pid-file="$root/run/mariadb.pid" --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
        </dev/null >>"$root/log/mariadb.log" 2>&1 &
    until_true 60 sql 'create database if not exists slurm' || die "see $root/log/mariadb.log"
}

start_node() { runs "$root/run/slurmd.$1.pid" || begin "$root/run/slurmd.$1.pid" slurmd -N "$1" -f "$SLURM_CONF"; }

all_ready() { # a call blocks for seconds while there is no slurmctld: never without a time limit
    local ready
    ready=$(timeout 3 sinfo -h -N -p debug -o '%t' 2>/dev/null | grep -cxE 'idle|mix|alloc') || true
    ((ready == nodes))
}

up() {
    if runs "$root/run/slurmctld.pid" && [[ -n $acct ]] && [[ ! -e $root/etc/slurmdbd.conf ]]; then
        die "the cluster in $root runs without accounting; first: bash $0 down"
    fi
    runs "$root/run/slurmctld.pid" || rm -f "$root/etc/slurmdbd.conf"
    install_packages
    make_folders
    runs "$root/run/slurmctld.pid" || write_config
    start_munge
    [[ ! -e $root/etc/slurmdbd.conf ]] || start_accounting
    runs "$root/run/slurmctld.pid" || begin "$root/run/slurmctld.pid" slurmctld -f "$SLURM_CONF"
    local node
    for node in $(node_names); do start_node "$node"; done
    until_true 60 all_ready || { sinfo -N -l >&2 || true; die "nodes are not idle after 60 s; logs are in $root/log"; }
    say "$nodes nodes are up; next: eval \"\$(bash $0 env)\""
}

steps_of() { # pids on node $1: the daemons of its steps (known by their log), then their tasks (known by environment)
    local process pid tasks=()
    for process in /proc/[0-9]*; do
        pid=${process#/proc/}
        if [[ $(readlink "$process/exe" 2>/dev/null) == */slurmstepd* ]]; then # Debian: slurmstepd-wlm
            [[ -n $(find "$process/fd" -lname "$root/log/slurmd.$1.log" -print -quit 2>/dev/null) ]] && echo "$pid"
        elif grep -qzxF "SLURMD_NODENAME=$1" "$process/environ" 2>/dev/null; then
            grep -qzxF "SLURM_CONF=$SLURM_CONF" "$process/environ" 2>/dev/null && tasks+=("$pid")
        fi
    done || true
    # A daemon that sees its task die first tells slurmctld of it, which no lost node does.
    printf '%s\n' "${tasks[@]}"
}

kill_pids() { local pid; for pid in "$@"; do kill -9 "$pid" 2>/dev/null || true; done; }

with_descendants() { # PID...: these and all below them, as a process with another environment is
    ps -eo pid=,ppid= | awk -v roots="$*" '
        { children[$2] = children[$2] " " $1 }
        END { n = split(roots, todo, " "); for (i = 1; i <= n; i++) { print todo[i]; m = split(children[todo[i]], more, " ")
              for (j = 1; j <= m; j++) todo[++n] = more[j] } }'
}

kill_node() {
    runs "$root/run/slurmd.$1.pid" || die "node $1 does not run"
    local pids pid
    # Stopped before any is killed: an srun whose other half dies would cancel its step on other nodes, as no lost node does.
    # shellcheck disable=SC2046
    mapfile -t pids < <(pid_in "$root/run/slurmd.$1.pid"; with_descendants $(steps_of "$1"))
    for pid in "${pids[@]}"; do kill -STOP "$pid" 2>/dev/null || true; done
    kill_pids "${pids[@]}"
    # shellcheck disable=SC2046
    kill_pids $(steps_of "$1") # what they had started meanwhile
    rm -f "$root/run/slurmd.$1.pid"
}

stop_daemons() { # PIDFILE...: all are asked before any is waited for; a daemon deletes its own pid file
    local file pid pids=()
    for file in "$@"; do if runs "$file"; then pids+=("$(pid_in "$file")"); fi; done
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do until_true 10 gone "$pid" || kill_pids "$pid"; done
    rm -f "$@"
}
gone() { ! kill -0 "$1" 2>/dev/null; }
no_jobs() { [[ -z $(timeout 5 squeue -h 2>/dev/null) ]]; }

down() {
    local node
    if runs "$root/run/slurmctld.pid"; then
        timeout 5 scancel -u root 2>/dev/null || true
        until_true 10 no_jobs || say "jobs did not end; their processes are killed"
    fi
    # shellcheck disable=SC2046
    for node in $(node_names); do kill_pids $(steps_of "$node"); done
    stop_daemons "$root"/run/slurmd.*.pid "$root/run/slurmctld.pid"
    stop_daemons "$root/run/slurmdbd.pid" # it writes what slurmctld told it last
    stop_daemons "$root/run/mariadb.pid"
    stop_daemons "$root/run/munged.pid"
    if [[ -n $purge && -e $root/etc/slurm.conf ]]; then rm -rf "$root"; fi
}

acct='' purge=''
case ${2:-} in
--acct) acct=1 ;;
--purge) purge=1 ;;
esac

case ${1:-} in
install) install_packages ;;
up) up ;;
down) down ;;
status) sinfo -N -p debug -o '%N %t %c %m %G'; squeue -o '%i %j %T %N'; squeue -s ;;
env) echo "export SLURM_CONF=$SLURM_CONF" ;;
kill-node) kill_node "${2:?name a node}" ;;
start-node) start_node "${2:?name a node}" ;;
*) sed -n '2,/^set /p' "$0" | grep '^#' | cut -c3- >&2; exit 2 ;;
esac

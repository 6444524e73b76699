#!/usr/bin/env bash
# Start an MPI job on two hosts, which are two network namespaces with TCP between them.
#
#   unshare --mount --net bash hosts.sh FOLDER RANKS_PER_HOST MPIEXEC ARGUMENT...
#
# MPICH's launcher enters the other namespace where it would use ssh. Each host has its own name, /dev/shm and System V
# memory: otherwise the ranks find each other there, and nothing crosses the wire. Once a program makes FOLDER/unplug, the
# link goes down; once it makes FOLDER/kill, all processes of the second host are killed.
set -eu
folder=$1 per_host=$2 mpiexec=$3
shift 3

mount -t tmpfs tmpfs /run
mkdir -p /run/netns
ip link set lo up
ip netns add host1
ip netns add host2
ip link add wire1 type veth peer name wire2
for i in 1 2; do
    ip link set wire$i netns host$i
    ip -n host$i address add 10.77.0.$i/24 dev wire$i
    ip -n host$i link set lo up
    ip -n host$i link set wire$i up
done

cat > "$folder/launcher" <<'LAUNCHER'
#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
host=host${1##*.}
shift
exec ip netns exec "$host" unshare --uts --ipc bash -c "hostname $host; mount -t tmpfs tmpfs /dev/shm; $*"
LAUNCHER
chmod +x "$folder/launcher"

(
    while sleep 0.05; do
        [[ ! -e $folder/unplug ]] || ip -n host2 link set wire2 down
        [[ ! -e $folder/kill ]] || ip netns pids host2 | xargs -r kill -KILL
    done
) &
# A rank behind a link that is down waits for the launcher, which has gone.
trap 'kill %1; { ip netns pids host1; ip netns pids host2; } | xargs -r kill -KILL' EXIT

command=("$mpiexec" -launcher ssh -launcher-exec "$folder/launcher" -hosts 10.77.0.1,10.77.0.2
    -n $((2 * per_host)) -ppn "$per_host" "$@")
ip netns exec host1 unshare --uts --ipc bash -c 'hostname host1; mount -t tmpfs tmpfs /dev/shm; exec "$@"' _ "${command[@]}"

#!/bin/sh
# Entry of every Orcinus container: `gateway`, `scheduler`, `worker`, `engines` (commands of `orcinus`), `healthcheck
# SERVICE`, and `torchrun ...`, which starts a worker's ranks on one of several machines.
# Turns what only a container knows (its secrets' files, its name on the network) into settings.
set -eu

# Compose hands on an unset variable as an empty one; empty means the default.
for name in $(env | sed -n 's/^\(ORCINUS_[A-Z_]*\)=$/\1/p'); do
    unset "$name"
done

if [ -r /secrets/redis/password ]; then
    ORCINUS_REDIS_PASSWORD=$(cat /secrets/redis/password)
    export ORCINUS_REDIS_PASSWORD
fi
if [ -r /secrets/rank-token/token ]; then
    ORCINUS_RANK_TOKEN=$(cat /secrets/rank-token/token)
    export ORCINUS_RANK_TOKEN
fi

case "${1:-}" in
    healthcheck)
        shift
        exec python /app/deploy/healthcheck.py "$@"
        ;;
    torchrun)
        exec "$@"
        ;;
    worker)
        # The container's name is its address inside the network and differs for each of `--scale worker=N`.
        : "${ORCINUS_WORKER_ID:=worker-$(hostname)}" "${ORCINUS_ADVERTISE:=$(hostname):${ORCINUS_LISTEN##*:}}"
        export ORCINUS_WORKER_ID ORCINUS_ADVERTISE
        ;;
    engines)
        : "${ORCINUS_ADVERTISE:=$(hostname):${ORCINUS_LISTEN##*:}}" "${ORCINUS_REDIS_USERS:=/tmp/redis-users}"
        export ORCINUS_ADVERTISE ORCINUS_REDIS_USERS
        # Each of its processes is another user of Redis: their files under the names that deploy/redis_users.py gives.
        mkdir -p /tmp/redis-users
        for user in scheduler worker placer; do
            ln -sf "/secrets/redis-$user/password" "/tmp/redis-users/$user.password"
        done
        ;;
esac
exec orcinus "$@"

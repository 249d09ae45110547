#!/usr/bin/env bash
# Brings compose.yaml up for real, runs deploy/smoke.py against it, scales it to three workers and two gateways, asks
# again, takes it down. `make compose-test` and CI call it.
#
# Where Docker with Compose works already, it is used as it is. Otherwise, as root on Debian 12: the engine comes from
# Debian 13's packages (Debian 12's have no Compose v2; these need no newer libc), and a daemon is started here and
# stopped at the end. Base images that cannot be pulled get stand-ins made from Debian's own packages under the official
# names: no registry is needed. Anywhere else it says what is missing and fails. Measured on
# two shared cores, one run each: 38 s and 88 s warm (images built before), 10 minutes cold.
# COMPOSE_TEST_PORT (11080, none of those that tests choose from) is the loopback port that the stack gets, gRPC the next
# but one.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PROJECT=orcinus-test
export PORT=${COMPOSE_TEST_PORT:-11080} GRPC_PORT=$((${COMPOSE_TEST_PORT:-11080} + 2)) DEBIAN_FRONTEND=noninteractive
# The stack under test is the default one, whatever the caller's shell or .env holds.
unset MODEL SERVED_MODEL_NAME DEVICE GPU POLICY PROCESSES LOG_LEVEL WORKER_MEMORY GATEWAY_MEMORY REDIS_MEMORY COMPOSE_PROFILES

WORK=$(mktemp -d)
chmod 755 "$WORK"
DAEMON_PID=""
TOUCHED=""

say() { printf '[%3ds] %s\n' "$SECONDS" "$*"; }
die() { say "compose-test: $*" >&2; exit 1; }

# Runs a command with its output in a log, which is shown only when it fails.
quietly() {
  local log="$WORK/$1.log"
  shift
  "$@" >"$log" 2>&1 || { tail -n 40 "$log" >&2; die "failed: $*"; }
}

compose() { docker compose --project-name "$PROJECT" --project-directory "$ROOT" --env-file /dev/null "$@"; }

show_logs() { compose logs --no-color --tail 80 | sed 's/^\x1b\[2K//' >&2; }

# Asks what a stack promises; the reason of a failure is shown below the logs, too.
promised() { # what was asked, command ...
  local what=$1
  shift
  (cd "$ROOT" && "$@" 2> >(tee "$WORK/reason" >&2)) || { show_logs; die "$what failed: $(tail -n 3 "$WORK/reason")"; }
  say "$what passed"
}

clean_up() {
  local code=$?
  trap - EXIT INT TERM
  [ -z "$TOUCHED" ] || compose down --volumes --remove-orphans --timeout 10 >"$WORK/down.log" 2>&1 || tail "$WORK/down.log" >&2
  if [ -n "$DAEMON_PID" ]; then
    kill -TERM "$DAEMON_PID" 2>/dev/null || true
    wait "$DAEMON_PID" 2>/dev/null || true
  fi
  rm -rf "$WORK"
  say "cleaned up"
  exit "$code"
}

# The Debian mirror that this machine's apt already uses.
debian_mirror() {
  { cat /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null || true; } | sed -nE \
    -e 's/^URIs:[[:space:]]*([^[:space:]]+).*/\1/p' -e 's/^deb[[:space:]]+(\[[^]]*\][[:space:]]+)?([^[:space:]]+).*/\2/p' |
    awk '/\/debian\/*$/ && !found { print; found = 1 } END { exit !found }'
}

have_plugins() { docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1; }

# Docker Engine, Compose and buildx from Debian 13, what they depend on from Debian 12; the system's own apt lists stay.
install_engine() {
  [ "$(id -u)" = 0 ] || die "no working Docker with Compose here, and installing it needs root"
  # shellcheck disable=SC1091
  [ "$(. /etc/os-release && echo "$ID-${VERSION_ID:-}")" = debian-12 ] || die "no working Docker with Compose here, and only Debian 12 can install it"
  local mirror apt="$WORK/apt"
  mirror=$(debian_mirror) || die "apt knows no Debian mirror"
  mkdir -p "$apt/lists/partial" "$apt/parts"
  cp /etc/apt/sources.list.d/debian.sources "$apt/parts/" 2>/dev/null || cp /etc/apt/sources.list "$apt/parts/debian.list"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$apt/parts/trixie.list"
  local options=(-qq -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$apt/parts" -o Dir::State::Lists="$apt/lists"
    -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o Acquire::Languages=none -o APT::Default-Release=bookworm)
  quietly apt-update apt-get "${options[@]}" update
  quietly apt-install apt-get "${options[@]}" install -y --no-install-recommends \
    docker.io/trixie docker-cli/trixie docker-compose/trixie docker-buildx/trixie iptables debootstrap
  say "installed Docker from Debian's packages"
}

start_daemon() {
  [ "$(id -u)" = 0 ] || die "no Docker daemon answers, and starting one needs root"
  command -v dockerd >/dev/null || install_engine
  setsid dockerd >"$WORK/dockerd.log" 2>&1 9>&- &
  DAEMON_PID=$!
  local tries
  for ((tries = 0; tries < 120; tries++)); do
    docker info >/dev/null 2>&1 && return
    kill -0 "$DAEMON_PID" 2>/dev/null || break
    sleep 0.5
  done
  tail -n 30 "$WORK/dockerd.log" >&2
  die "dockerd did not start"
}

# True when the image is here, or a registry gives it.
image_at_hand() { docker image inspect "$1" >/dev/null 2>&1 || timeout 90 docker pull -q "$1" >/dev/null 2>&1; }

stand_in_debian() {
  command -v debootstrap >/dev/null || die "no registry answers, and there is no debootstrap to make $1 with"
  quietly debootstrap debootstrap --variant=minbase bookworm "$WORK/rootfs" "$(debian_mirror)"
  rm -rf "$WORK"/rootfs/var/cache/apt/archives/*.deb "$WORK"/rootfs/usr/share/{doc,man,locale}/*
  tar -C "$WORK/rootfs" -c . | docker import --change 'CMD ["bash"]' \
    --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' - "$1" >/dev/null
  rm -rf "$WORK/rootfs"
}

# Debian's Python 3.11 under the official name, with this machine's extra CA certificates and local wheels, if it has any.
stand_in_python() {
  local context="$WORK/python" links
  mkdir -p "$context/ca" "$context/wheels"
  cp /usr/local/share/ca-certificates/*.crt "$context/ca/" 2>/dev/null || true
  links=$(python3 -m pip config get global.find-links 2>/dev/null || true)
  [ ! -d "$links" ] || cp "$links"/*.whl "$context/wheels/" 2>/dev/null || true
  cat >"$context/Dockerfile" <<'DOCKERFILE'
FROM debian:bookworm-slim
COPY ca/ /usr/local/share/ca-certificates/
COPY wheels/ /opt/wheels/
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 python3-pip python3-venv \
    && update-ca-certificates && rm -rf /var/lib/apt/lists/* /usr/lib/python3.11/EXTERNALLY-MANAGED \
    && printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\nfind-links = /opt/wheels\n' > /etc/pip.conf \
    && ln -s /usr/bin/python3 /usr/local/bin/python3 && ln -s /usr/bin/python3 /usr/local/bin/python && ln -s /usr/bin/pip3 /usr/local/bin/pip
CMD ["python3"]
DOCKERFILE
  quietly stand-in-python docker build -t "$1" "$context"
}

# Debian's Redis 7.0 under the official name and with its user ids, without the official entrypoint.
stand_in_redis() {
  mkdir -p "$WORK/redis"
  cat >"$WORK/redis/Dockerfile" <<'DOCKERFILE'
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends redis-server redis-tools && rm -rf /var/lib/apt/lists/* \
    && install -d -o 999 -g 1000 /data
WORKDIR /data
VOLUME /data
EXPOSE 6379
CMD ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no"]
DOCKERFILE
  quietly stand-in-redis docker build -t "$1" "$WORK/redis"
}

base_images() {
  image_at_hand python:3.11.14-slim-bookworm && image_at_hand redis:7.4.7-alpine && return
  image_at_hand debian:bookworm-slim || { stand_in_debian debian:bookworm-slim; say "stand-in for debian:bookworm-slim"; }
  image_at_hand python:3.11.14-slim-bookworm || { stand_in_python python:3.11.14-slim-bookworm; say "stand-in for python:3.11.14-slim-bookworm"; }
  image_at_hand redis:7.4.7-alpine || { stand_in_redis redis:7.4.7-alpine; say "stand-in for redis:7.4.7-alpine"; }
}

# One run at a time: the project name, the port and a daemon started here are shared.
mkdir -p "$ROOT/.run"
exec 9>"$ROOT/.run/compose-test.lock"
flock -n 9 || { echo "compose-test: another run holds .run/compose-test.lock" >&2; rm -rf "$WORK"; exit 1; }

trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

have_plugins || install_engine
docker info >/dev/null 2>&1 || start_daemon
say "Docker $(docker version -f '{{.Server.Version}}'), Compose $(docker compose version --short)"
base_images
say "base images"

TOUCHED=yes
compose down --volumes --remove-orphans --timeout 10 >/dev/null 2>&1 || true # of a run that was killed
quietly build compose --progress plain --profile ops build
say "images built"
# Of the GPU's image what needs no GPU and no gigabytes: the file is read, the kernels are compiled.
quietly gpu-config compose -f "$ROOT/compose.yaml" -f "$ROOT/deploy/compose.gpu.yaml" config
MODELS=$WORK MODELS_DIR=$WORK quietly models-config compose -f "$ROOT/compose.yaml" -f "$ROOT/deploy/compose.models.yaml" config
quietly roles-config compose -f "$ROOT/compose.yaml" -f "$ROOT/deploy/compose.roles.yaml" config
quietly gpu-kernels docker build --progress plain --target cuda-kernels --output type=cacheonly -f "$ROOT/deploy/Dockerfile" "$ROOT"
say "kernels for GPUs compiled"
if ! compose up -d --wait --wait-timeout 300 >"$WORK/up.log" 2>&1; then
  tail -n 30 "$WORK/up.log" >&2
  compose ps -a >&2
  show_logs
  die "the stack did not become healthy"
fi
say "stack healthy"
compose ps --format 'table {{.Service}}\t{{.Status}}\t{{.Ports}}'
promised smoke python3 deploy/smoke.py --project "$PROJECT" --port "$PORT"
quietly doctor compose run --rm ops doctor
say "doctor passed"
export COMPOSE_PROFILES=grpc
scaled() { quietly scale compose up -d --wait --wait-timeout 300 --scale worker=3 --scale gateway=2; }
scaled
say "three workers, two gateways, gRPC"
promised "smoke of the scaled stack" python3 -m deploy.smoke_scaled \
  --project "$PROJECT" --port "$PORT" --grpc-port "$GRPC_PORT" --workers 3 --gateways 2
scaled # a gateway that starts again ends at SIGTERM at once, and not with 0
quietly stop compose stop
failures=$(compose ps -aq | xargs docker inspect -f '{{.Name}} {{.State.ExitCode}}' | grep -v ' 0$' || true)
[ -z "$failures" ] || { show_logs; die "did not stop cleanly: $failures"; }
say "stopped cleanly"

#!/bin/sh
# Starts the server of this bundle and keeps it until it is stopped (Ctrl-C, SIGTERM). The bundle is only read.
#
#   ./start              listens on 127.0.0.1
#   HOST=0.0.0.0 ./start accepts other hosts. There is no login
#
# Variables: HOST, HTTP_PORT, GRPC_PORT, METRICS_PORT; TMPDIR for a few small files. BUNDLE_WORK names their folder, which
# is kept then; `./start prepare` only fills it.
set -eu

host=${HOST:-127.0.0.1} http_port=${HTTP_PORT:-8000} grpc_port=${GRPC_PORT:-8001} metrics_port=${METRICS_PORT:-8002}

die() { echo "error: $1" >&2; exit 2; }
need() {
    for program in "$@"; do
        command -v "$program" > /dev/null || die "$program is not on PATH; README.md says what this bundle needs"
    done
}

here=$(cd "$(dirname "$0")" && pwd -P)
work=${BUNDLE_WORK:-$(mktemp -d "${TMPDIR:-/tmp}/bundle.XXXXXX")}
run_prefix=
finish() {
    # A server that was killed leaves its files in shared memory.
    [ -z "$run_prefix" ] || rm -f "/dev/shm/$run_prefix"*
    [ -n "${BUNDLE_WORK:-}" ] || rm -rf "$work"
}
trap finish EXIT
case $work in
    /*) ;;
    *) die "$work: TMPDIR and BUNDLE_WORK have to be absolute" ;;
esac
case $work in
    *[!A-Za-z0-9_./+-]*) die "$work: set TMPDIR to a folder whose path has only letters, digits and . _ - +" ;;
esac

mkdir -p "$work"
# The repository has paths into the bundle, which may have any name: they lead through a link.
rm -rf "$work/repository" "$work/bundle"
ln -s "$here" "$work/bundle"
cp -R "$here/repository" "$work/repository"
chmod -R u+w "$work/repository"
find "$work/repository" -type f \( -name config.pbtxt -o -name '*.yaml' \) -exec \
    sed -i "s|@BUNDLE@|$work/bundle|g" {} +

@part@

[ "${1:-}" != prepare ] || exit 0

"$@" &
child=$!
stopping= timer=
stop() {
    stopping=1
    # mpirun would kill its ranks a second after its own signal: they get theirs first, and end in order.
    ranks=
    [ "$1" != mpirun ] || ranks=$(cat "/proc/$child/task/$child/children" 2> /dev/null || true)
    # shellcheck disable=SC2086
    kill -TERM ${ranks:-$child} 2> /dev/null || true
    if [ -n "$ranks" ] && [ -z "$timer" ]; then
        (
            sleep @patience@ &
            nap=$!
            trap 'kill "$nap"; exit 0' TERM
            wait "$nap"
            kill -TERM "$child" 2> /dev/null || true
        ) &
        timer=$!
    fi
}
trap 'stop "$1"' INT TERM HUP
status=0
while :; do
    wait "$child" && status=0 || status=$?
    kill -0 "$child" 2> /dev/null || break # a signal ends `wait` as well
done
[ -z "$timer" ] || kill -TERM "$timer" 2> /dev/null || true
[ -z "$stopping" ] || status=0
exit "$status"

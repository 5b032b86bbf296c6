PATH=$PATH:/opt/tritonserver/bin:/usr/local/mpi/bin:/opt/hpcx/ompi/bin
export PATH
[ "${1:-}" = prepare ] || {
    need tritonserver
    # Interfaces that no client needs are closed by a header that cannot be sent: its name has a colon.
    closing=
    random=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    known=$(tritonserver --help 2>&1 || true)
    for option in http-restricted-api grpc-restricted-protocol; do
        case $known in
            *"--$option "*) closing="$closing --$option=@closed@:no:$random=$random" ;;
            *) echo "warning: this Triton has no --$option: keep its ports from strangers" >&2 ;;
        esac
    done
    run_prefix=bundle-$$-$(od -An -N4 -tx1 /dev/urandom | tr -d ' \n')-
    set -- @command@@by_mpirun@
    # MPIRUN_OPTIONS: hosts and how they are reached, for engines over several of them.
    if [ "$1" = mpirun ]; then
        need mpirun
        shift
        # shellcheck disable=SC2086
        set -- mpirun ${MPIRUN_OPTIONS:-} "$@"
    fi
}

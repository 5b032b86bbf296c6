PATH=$PATH:/usr/local/mpi/bin:/opt/hpcx/ompi/bin
export PATH
[ "${1:-}" = prepare ] || {
    need trtllm-serve
    if [ -n "${MPIRUN_OPTIONS:-}" ]; then # over several hosts
        need mpirun trtllm-llmapi-launch
        set -- @multi_node@
        shift
        # shellcheck disable=SC2086
        set -- mpirun $MPIRUN_OPTIONS "$@"
    else
        set -- @command@
    fi
}

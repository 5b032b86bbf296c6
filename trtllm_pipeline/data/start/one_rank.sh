    # A single rank runs without mpirun as well.
    if @wanted@; then
        set -- @mpirun@ "$@"
    fi

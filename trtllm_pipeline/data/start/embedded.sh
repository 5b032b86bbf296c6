[ "${1:-}" = prepare ] || {
    need pipeline
    set -- @command@
}

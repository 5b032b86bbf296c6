"""`pipeline doctor --deep`: verify this package's knowledge of an installed toolchain, see `examination.examine`."""

"""Matrix files and recipes in, cells out: read (`document`), checked (`models`, `load`), multiplied out (`expand`)."""

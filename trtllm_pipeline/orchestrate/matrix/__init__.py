"""Matrix files and recipes in, cells out: read (`document`), checked (`validate`, by `models`), multiplied out (`expand`)."""

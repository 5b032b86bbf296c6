"""Executors: where stage runs happen. Each runs the same job files; they differ in where."""

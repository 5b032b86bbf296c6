"""Matrix files and recipes in, cells out: read (`document`), checked (`validate`, by `models`) or known from before (`load`), multiplied
out (`expand`).
"""

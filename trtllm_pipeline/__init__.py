"""From a matrix of models to measured Triton servers.

The flow, each arrow one function with one plain type on either side (`flow.py` shows them in order):

    matrix + recipes -> cells -> plan -> schedule -> stage runs -> artifacts -> report
"""

__version__ = "0.1.0"

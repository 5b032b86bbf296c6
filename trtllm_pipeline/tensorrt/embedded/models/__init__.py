"""The Python models of the Triton repository. Imported by Triton's Python stub, except `tensors`, which only describes."""

"""TensorRT-LLM: engines for the releases that have them, PyTorch for those since 1.0."""

"""A machine: its CPUs, GPUs, Triton and TensorRT-LLM."""

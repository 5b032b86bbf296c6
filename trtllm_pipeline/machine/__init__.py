"""What a machine has: CPUs, GPUs, Triton, TensorRT-LLM."""

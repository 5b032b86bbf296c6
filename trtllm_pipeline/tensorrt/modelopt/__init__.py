"""Our quantization worker on NVIDIA Model Optimizer, for TensorRT-LLM without example scripts.

`formats` defines the precisions, `calibration_batches` tokenizes and batches the rows, `forward` runs them through the
model, `checkpoint_writer` and `shards` write a TensorRT-LLM checkpoint, `quantization_worker` is the stage's program, `job`
starts it under another Python. Needs the extra [quantize].
"""

"""Our quantization worker on NVIDIA Model Optimizer, for TensorRT-LLM where no example scripts are at hand.

`formats` says what each precision is, `calibration` tokenizes and batches the rows, `forward` runs them through the model,
`checkpoint` and `shards` write a TensorRT-LLM checkpoint, `worker` is the stage's program, `job` starts it under another
Python. Needs the extra [quantize].
"""

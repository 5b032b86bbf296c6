"""Our quantization worker on NVIDIA Model Optimizer, for TensorRT-LLM where no example scripts are at hand.

`formats` says what each precision is, `calibration` reads and batches the rows, `forward` runs them through the model,
`checkpoint` and `shards` write a TensorRT-LLM checkpoint, `worker` is the stage's program. Needs the extra [quantize].
"""

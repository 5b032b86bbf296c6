"""Stand-ins for the programs of TensorRT-LLM, release by release, for machines that cannot have it.

`installation.install` lays out what a GPU machine with one release would show: the programs, the example scripts, the
package metadata and NVML. The programs take the options that were recorded of that release and no others, check their
input, write folders of the documented shape, and fail in the documented ways, with the recorded words. Where no words
were recorded, theirs start with "stand-in:". They compute nothing: weights are a few bytes, answers follow a rule.

`triton` has a stand-in for Triton's backend `tensorrtllm`.

This file stays empty of imports: every program imports it when it starts.
"""

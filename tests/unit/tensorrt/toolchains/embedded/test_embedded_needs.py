"""What the embedded toolchain needs of memory rests on the runtime's own numbers."""

from trtllm_pipeline.tensorrt.embedded import needs, runtime


def test_logits_are_counted_for_the_steps_that_the_runtime_takes() -> None:
    assert needs.STEP_TOKENS == runtime.CHUNK_TOKENS

"""Stream an answer from a Triton server with TensorRT-LLM's models, token by token.

    python examples/stream.py --url 127.0.0.1:8001 --prompt "The capital of France is"

Nothing here knows which toolchain serves: the same script talks to an embedded server and to TensorRT-LLM.
"""

from __future__ import annotations

import argparse
import queue
import sys

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> int:
    """Print the answer as it comes; 1 if the server answers with an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="127.0.0.1:8001", help="gRPC address of the server")
    parser.add_argument("--model", default="ensemble", help="ensemble or tensorrt_llm_bls")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()

    values = {
        "text_input": np.array([[arguments.prompt.encode()]], dtype=np.object_),
        "max_tokens": np.array([[arguments.max_tokens]], dtype=np.int32),
        "stream": np.array([[True]]),
    }
    types = {"text_input": "BYTES", "max_tokens": "INT32", "stream": "BOOL"}
    inputs = []
    for name, value in values.items():
        tensor = grpcclient.InferInput(name, value.shape, types[name])
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)

    answers: queue.Queue[tuple[grpcclient.InferResult | None, Exception | None]] = queue.Queue()
    with grpcclient.InferenceServerClient(arguments.url) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(arguments.model, inputs, request_id="1", enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=120)
            if error is not None:
                print(f"\n{error}", file=sys.stderr)
                return 1
            text = result.as_numpy("text_output")
            if text is not None:
                print(text.flat[0].decode(), end="", flush=True)
            if result.get_response().parameters["triton_final_response"].bool_param:
                print()
                return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m trtllm_pipeline.serve.gateway CONFIG.json`: a gateway without the command line's packages."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_pipeline.base import PipelineError
from trtllm_pipeline.serve.gateway import run
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig


def main(argv: Sequence[str]) -> int:
    """Run the gateway that a file describes. Writes gateway.json next to it, and prints it as one line."""
    if len(argv) != 1:
        print("usage: python -m trtllm_pipeline.serve.gateway CONFIG.json", file=sys.stderr)  # noqa: T201
        return 2
    path = Path(argv[0])
    try:
        run(GatewayConfig.read(path), path.absolute().parent, _announce)
    except PipelineError as error:
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


def _announce(content: Mapping[str, Any]) -> None:
    print(json.dumps(content), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

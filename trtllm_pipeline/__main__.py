"""`python -m trtllm_pipeline` is `pipeline`."""

import sys

from trtllm_pipeline.cli.app import main

if __name__ == "__main__":
    sys.exit(main())

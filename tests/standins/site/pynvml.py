"""NVML as a machine with the stand-ins' GPUs would show it.

`install` copies this module into the installation's site-packages, and `tests/helpers/nvml.py` beside it under the name
`boards`. The GPUs are in `standin.json` one directory above.
"""

import json
import sys
from pathlib import Path

from boards import Board, nvml

_GPUS = json.loads((Path(__file__).resolve().parents[1] / "standin.json").read_text(encoding="utf-8"))["gpus"]
_BOARDS = [
    Board(gpu["uuid"], gpu["name"], gpu["memory_bytes"], gpu["memory_bytes"], divmod(gpu["sm"], 10)) for gpu in _GPUS
]
sys.modules[__name__] = nvml(_BOARDS, init_fails=not _BOARDS)

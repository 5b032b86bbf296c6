"""`examples/run.py`: one answer from an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tests.standins.programs import ProgramError, Work, arguments
from tests.standins.programs.engine import check_tokenizer, read_engine


def run(work: Work, argv: Sequence[str]) -> int:
    """Answer the input text."""
    options = arguments.parse("run.py", work.facts["tools"][work.tool][work.tool], argv)
    if options.get("input_file") is None:
        check_tokenizer(options["tokenizer_dir"])
    if not work.gpus:
        raise ProgramError("RuntimeError: No CUDA GPUs are available")
    config = read_engine(work, Path(options["engine_dir"]), ranks=work.ranks)
    work.begin()
    time.sleep(work.seconds("run.py"))
    if work.rank == 0:
        limit = config["build_config"].get("max_output_len") or config["build_config"]["max_seq_len"]
        for index, text in enumerate(options["input_text"]):
            words = text.split() or ["nothing"]
            answer = " ".join(words[i % len(words)] for i in range(min(options["max_output_len"], limit)))
            print(f'Input [Text {index}]: "{text}"\nOutput [Text {index} Beam 0]: "{answer}"')
    return 0

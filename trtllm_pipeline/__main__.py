"""`pipeline`, and `python -m trtllm_pipeline`: the command line, or what is left of it where packages are missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def main() -> int:
    """Run one command. Without Typer only `doctor` can: it says what else is missing."""
    try:
        from trtllm_pipeline.show import main as run
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        return _without_typer(sys.argv[1:])
    except KeyboardInterrupt:  # from then on `run` says so
        sys.stderr.write("interrupted\n")
        return 130
    return run()


def _without_typer(words: Sequence[str]) -> int:
    import json

    from trtllm_pipeline.base import DEFAULT_WORKSPACE
    from trtllm_pipeline.show import doctor_findings

    if words[:1] != ["doctor"]:
        sys.stderr.write("error: the package typer is not installed\n  try: pipeline doctor, which does without\n")
        return 2
    found = doctor_findings.run(Path(DEFAULT_WORKSPACE))
    as_json = "json" in words or "--format=json" in words
    sys.stdout.write((json.dumps(found.to_json(), indent=2) if as_json else found.text(sys.stdout.encoding)) + "\n")
    return found.exit_code


if __name__ == "__main__":
    sys.exit(main())

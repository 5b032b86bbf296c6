"""Starts the worker by the path of this file, under a Python without this package.

`job.command` writes its command line.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _make_importable() -> None:
    """Make only the package around this file importable, not the packages installed next to it."""
    here = Path(__file__).resolve().parent
    # Python searches a script's directory first, so our modules would hide others of the same names.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    folder = next(each for each in here.parents if each.name == "trtllm_pipeline")
    spec = importlib.util.spec_from_file_location(
        folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[folder.name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _make_importable()
    from trtllm_pipeline.tensorrt import worker

    sys.exit(worker.main([*sys.argv[1:], "trtllm_pipeline.tensorrt.modelopt.quantization_worker:run"]))

"""`examples/quantization/quantize.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.standins import refusals
from tests.standins.programs import ProgramError, Work, arguments
from tests.standins.programs.checkpoint import read_model, write_checkpoint

ALGORITHMS: Final = {
    "fp8": "FP8",
    "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "int8_wo": "W8A16",
    "int4_wo": "W4A16",
    "nvfp4": "NVFP4",
    "full_prec": None,
}
WITHOUT_CALIBRATION: Final = frozenset(("full_prec", "int8_wo", "int4_wo"))
_DEFAULT_DATASET: Final = "cnn_dailymail"


def run(work: Work, argv: Sequence[str]) -> int:
    """Quantize."""
    options = arguments.parse("quantize.py", work.facts["tools"][work.tool][work.tool], argv)
    if not work.gpus:
        raise ProgramError("OSError: GPU is required for inference.")
    model = read_model(work, options["model_dir"])
    qformat, kv = options["qformat"], options["kv_cache_dtype"]
    calibrates = qformat not in WITHOUT_CALIBRATION or kv is not None
    dataset = options.get("calib_dataset", _DEFAULT_DATASET)
    facts = {
        "architecture": model["architectures"][0],
        "calibrates": calibrates,
        "dataset_known": dataset == "pileval" or _DEFAULT_DATASET in dataset,
        "dataset_is_folder": Path(dataset).is_dir(),
        "dataset_named_cnn": _DEFAULT_DATASET in dataset,
    }
    for _, said in refusals.applied(work.facts["refusals"]["quantize.py"], facts):
        raise ProgramError(said)
    if calibrates:
        _check_dataset(dataset, work.facts["hub_datasets"])
    work.begin()
    awq: dict[str, Any] = {
        "group_size": options["awq_block_size"],
        "has_zero_point": False,
        "pre_quant_scale": True,
        "exclude_modules": ["lm_head"],
    }
    write_checkpoint(
        work,
        Path(options["output_dir"]),
        model,
        dtype=options["dtype"],
        tp=options["tp_size"],
        pp=options["pp_size"],
        cp=options.get("cp_size", 1),
        quantization={
            "quant_algo": ALGORITHMS[qformat],
            "kv_cache_quant_algo": kv.upper() if kv else None,
            **(awq if qformat.endswith("awq") else {}),
        },
    )
    print(f"Quantized model exported to {options['output_dir']}")
    return 0


def _check_dataset(name: str, on_hub: Sequence[str]) -> None:
    """Raise ProgramError for a data set that is neither a folder with files nor on the hub that can be reached."""
    folder = Path(name)
    if folder.is_dir():
        if not any(path.is_file() for path in folder.rglob("*")):
            raise ProgramError(
                f"datasets.exceptions.EmptyDatasetError: The directory at {name} doesn't contain any data files"
            )
    elif name not in on_hub:
        raise ProgramError(f"ConnectionError: Couldn't reach '{name}' on the Hub (ConnectionError)")

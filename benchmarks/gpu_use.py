"""GPU work of the stage runs of `two_gpus.py`."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.base.files.writing import write_json
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import Param

RESULT: Final = "use.json"
PID: Final = "pid"
WINDOWS: Final = 5
TOGETHER_S: Final = 180.0
"""How long those that are to run together wait for each other."""
LLAMA: Final = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class Use:
    """GPU work of a stage run."""

    number: Annotated[int, Param("which of them")]
    what: Annotated[str, Param("hold or load")]
    rule: Annotated[str, Param("what may run at the same time")]
    seconds: Annotated[float, Param("duration of holding, and of each window of a load")]
    gib: Annotated[float, Param("allocated on each device")]
    together: Annotated[int, Param("loads that start at the same time")]
    cpu: Annotated[bool, Param("on the CPU instead")]
    meet: Annotated[str, Param("directory where these synchronize", runtime=True)]


def use(context: StageContext[Use]) -> None:
    """The program of the stage."""
    import torch

    parameters = context.params
    (context.attempt / PID).write_text(str(os.getpid()), encoding="ascii")
    devices = ["cpu"] if parameters.cpu else [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    held = [torch.zeros(int(parameters.gib * 2**30), dtype=torch.uint8, device=device) for device in devices]
    result: dict[str, Json] = {
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "devices": 0 if parameters.cpu else torch.cuda.device_count(),
        "uuids": [] if parameters.cpu else [f"GPU-{torch.cuda.get_device_properties(each).uuid}" for each in devices],
        "cpus": [*sorted(os.sched_getaffinity(0))],
        "begin_s": time.time(),
    }
    if parameters.what == "hold":
        _hold(devices, parameters.seconds)
    else:
        result |= _load(parameters, devices[0])
    del held
    write_json(context.out / RESULT, {**result, "end_s": time.time()})


def _hold(devices: Sequence[str], seconds: float) -> None:
    import torch

    matrices = [torch.randn(4096 if device != "cpu" else 256, 1024, device=device) for device in devices]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for matrix in matrices:
            float((matrix @ matrix.T).sum())


def _load(parameters: Use, device: str) -> dict[str, Json]:
    """Windows of decoding and prefilling: start, end, tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512} if parameters.cpu else {}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **small})).to(device=device, dtype=torch.bfloat16).eval()
    prompt = torch.randint(0, 32000, (8, 64), device=device)
    long = torch.randint(0, 32000, (8, 64 if parameters.cpu else 2048), device=device)

    def decode() -> int:
        answer = model.generate(prompt, min_new_tokens=16, max_new_tokens=16, do_sample=False, pad_token_id=0)
        return int(answer.shape[0] * (answer.shape[1] - prompt.shape[1]))

    def prefill() -> int:
        float(model(long, use_cache=False).logits[0, -1, 0])  # waits for the device
        return int(long.numel())

    with torch.inference_mode():
        for _ in range(3):
            decode(), prefill()
        _meet(Path(parameters.meet), parameters.number, parameters.together)
        return {"decode": _windows(decode, parameters.seconds), "prefill": _windows(prefill, parameters.seconds)}


def _windows(work: Callable[[], int], seconds: float) -> list[Json]:
    windows: list[Json] = []
    for _ in range(WINDOWS):
        begin, tokens = time.time(), 0
        while time.time() < begin + seconds:
            tokens += work()
        windows.append([begin, time.time(), tokens])
    return windows


def _meet(folder: Path, number: int, together: int) -> None:
    (folder / str(number)).touch()
    until = time.monotonic() + TOGETHER_S
    while len(list(folder.iterdir())) < together:
        if time.monotonic() > until:
            raise TimeoutError(f"{together} loads were to run together")
        time.sleep(0.01)

"""NVML with the names of nvidia-ml-py, over boards that say what we make them say."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

GIB = 2**30


@dataclass
class Board:
    """What the stand-in NVML says of one device; None is "not supported"."""

    uuid: str | bytes | None
    name: str | None = "NVIDIA H100 80GB HBM3"
    memory: int | None = 80 * GIB
    free: int = 79 * GIB
    capability: tuple[int, int] | None = (9, 0)
    processes: int = 0
    slices: list[Board] | None = None
    """Of a GPU in MIG mode."""
    lost: bool = False
    bus: str | bytes | None = None
    milliwatts: int | None = None
    reads: int = 0
    """Of its power."""
    sm_mhz: int | None = None
    celsius: int | None = None
    bus_width: int | None = None
    memory_mhz: int | None = None


def nvml(boards: list[Board], *, init_fails: bool = False) -> ModuleType:
    """A module with the functions of nvidia-ml-py that are used, over `boards`."""
    module: Any = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def known(value: Any) -> Any:
        if value is None:
            raise NVMLError("Not Supported")
        return value

    def handle(index: int) -> Board:
        if not module.started:
            raise NVMLError("Uninitialized")
        if boards[index].lost:
            raise NVMLError("GPU is lost")
        return boards[index]

    def init() -> None:
        if init_fails:
            raise NVMLError("Driver/library version mismatch")
        module.started = True

    def memory(board: Board) -> SimpleNamespace:
        total = known(board.memory)
        return SimpleNamespace(total=total, free=board.free, used=total - board.free)

    def piece(board: Board, number: int) -> Board:
        if number >= len(board.slices or ()):
            raise NVMLError("Not Found")
        return known(board.slices)[number]

    def power(board: Board) -> int:
        board.reads += 1
        return known(board.milliwatts)

    def clock(board: Board, kind: int) -> int:
        assert kind == module.NVML_CLOCK_SM
        return known(board.sm_mhz)

    def highest_clock(board: Board, kind: int) -> int:
        assert kind == module.NVML_CLOCK_MEM
        return known(board.memory_mhz)

    def temperature(board: Board, sensor: int) -> int:
        assert sensor == module.NVML_TEMPERATURE_GPU
        return known(board.celsius)

    module.NVMLError = NVMLError
    module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM, module.NVML_TEMPERATURE_GPU = 1, 2, 0
    module.started = module.shut_down = False
    module.nvmlInit = init
    module.nvmlShutdown = lambda: setattr(module, "shut_down", True)
    module.nvmlDeviceGetCount = lambda: len(boards)
    module.nvmlDeviceGetHandleByIndex = handle
    module.nvmlDeviceGetHandleByUUID = lambda uuid: next(each for each in boards if each.uuid == uuid.decode())
    module.nvmlDeviceGetUUID = lambda board: known(board.uuid)
    module.nvmlDeviceGetName = lambda board: known(board.name)
    module.nvmlDeviceGetMemoryInfo = memory
    module.nvmlDeviceGetCudaComputeCapability = lambda board: known(board.capability)
    module.nvmlDeviceGetComputeRunningProcesses = lambda board: [object()] * board.processes
    module.nvmlDeviceGetPciInfo = lambda board: SimpleNamespace(busId=known(board.bus))
    module.nvmlDeviceGetMigMode = lambda board: known((1, 1) if board.slices is not None else None)
    module.nvmlDeviceGetMaxMigDeviceCount = lambda _board: 7
    module.nvmlDeviceGetMigDeviceHandleByIndex = piece
    module.nvmlDeviceGetPowerUsage = power
    module.nvmlDeviceGetClockInfo = clock
    module.nvmlDeviceGetMaxClockInfo = highest_clock
    module.nvmlDeviceGetTemperature = temperature
    module.nvmlDeviceGetMemoryBusWidth = lambda board: known(board.bus_width)
    module.nvmlDeviceGetUtilizationRates = lambda _board: known(None)
    module.nvmlSystemGetDriverVersion = lambda: b"580.65.06"
    module.nvmlSystemGetCudaDriverVersion_v2 = lambda: 12080
    return module

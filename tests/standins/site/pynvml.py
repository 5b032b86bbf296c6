# ruff: noqa: N801, N802, N816, N818, PLW0603  names and ways of the module it stands in for
"""NVML as a machine with the stand-ins' GPUs would show it: the part of nvidia-ml-py's `pynvml` that programs use.

`install` copies this module into the installation's site-packages; the GPUs are in `standin.json` one folder above.
"""

import json
from pathlib import Path
from types import SimpleNamespace

_FACTS = json.loads((Path(__file__).resolve().parents[1] / "standin.json").read_text(encoding="utf-8"))
_GPUS = _FACTS["gpus"]
NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_DEVICE_MIG_DISABLE = 0
NVML_CLOCK_GRAPHICS = 0
NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_TEMPERATURE_GPU = 0
_initialized = False


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(value)
        self.value = value

    def __str__(self):
        return {
            NVML_ERROR_UNINITIALIZED: "Uninitialized",
            NVML_ERROR_INVALID_ARGUMENT: "Invalid Argument",
            NVML_ERROR_NOT_SUPPORTED: "Not Supported",
            NVML_ERROR_NOT_FOUND: "Not Found",
            NVML_ERROR_DRIVER_NOT_LOADED: "Driver Not Loaded",
        }[self.value]


class NVMLError_Uninitialized(NVMLError):
    pass


class NVMLError_InvalidArgument(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_DriverNotLoaded(NVMLError):
    pass


def nvmlInit():
    global _initialized
    if not _GPUS:
        raise NVMLError_DriverNotLoaded(NVML_ERROR_DRIVER_NOT_LOADED)
    _initialized = True


def nvmlInitWithFlags(flags):
    nvmlInit()


def nvmlShutdown():
    global _initialized
    _check()
    _initialized = False


def _check():
    if not _initialized:
        raise NVMLError_Uninitialized(NVML_ERROR_UNINITIALIZED)


def nvmlSystemGetDriverVersion():
    _check()
    return _FACTS["driver"]


def nvmlSystemGetCudaDriverVersion():
    _check()
    major, minor = _FACTS["cuda"].split(".")
    return int(major) * 1000 + int(minor) * 10


nvmlSystemGetCudaDriverVersion_v2 = nvmlSystemGetCudaDriverVersion


def nvmlDeviceGetCount():
    _check()
    return len(_GPUS)


def nvmlDeviceGetHandleByIndex(index):
    _check()
    if not 0 <= index < len(_GPUS):
        raise NVMLError_InvalidArgument(NVML_ERROR_INVALID_ARGUMENT)
    return _GPUS[index]


def nvmlDeviceGetHandleByUUID(uuid):
    _check()
    name = uuid.decode() if isinstance(uuid, bytes) else uuid
    for gpu in _GPUS:
        if gpu["uuid"] == name:
            return gpu
    raise NVMLError_NotFound(NVML_ERROR_NOT_FOUND)


nvmlDeviceGetCount_v2 = nvmlDeviceGetCount
nvmlDeviceGetHandleByIndex_v2 = nvmlDeviceGetHandleByIndex


def nvmlDeviceGetIndex(handle):
    return handle["index"]


def nvmlDeviceGetUUID(handle):
    return handle["uuid"]


def nvmlDeviceGetName(handle):
    return handle["name"]


def nvmlDeviceGetMemoryInfo(handle, version=None):
    total = handle["memory_bytes"]
    return SimpleNamespace(total=total, free=total, used=0)


def nvmlDeviceGetCudaComputeCapability(handle):
    return divmod(handle["sm"], 10)


def nvmlDeviceGetMigMode(handle):
    if handle["sm"] < 80:
        raise NVMLError_NotSupported(NVML_ERROR_NOT_SUPPORTED)
    return [NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_DISABLE]


def nvmlDeviceGetMaxMigDeviceCount(handle):
    return 0


def nvmlDeviceGetMigDeviceHandleByIndex(handle, index):
    raise NVMLError_NotFound(NVML_ERROR_NOT_FOUND)


def nvmlDeviceGetPowerUsage(handle):
    raise NVMLError_NotSupported(NVML_ERROR_NOT_SUPPORTED)


def nvmlDeviceGetUtilizationRates(handle):
    raise NVMLError_NotSupported(NVML_ERROR_NOT_SUPPORTED)


def nvmlDeviceGetClockInfo(handle, kind):
    raise NVMLError_NotSupported(NVML_ERROR_NOT_SUPPORTED)


def nvmlDeviceGetComputeRunningProcesses(handle):
    return []

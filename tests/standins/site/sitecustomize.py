"""Python imports this when it starts. Lets the device file of NVIDIA's driver seem to be there, as `pynvml` beside it
lets the driver: programs look for the file before they load NVML."""

import os.path

if "PYTEST_CURRENT_TEST" in os.environ:
    import patience

    patience.install()

_DEVICE = "/dev/nvidiactl"
_exists = os.path.exists
os.path.exists = lambda path: path == _DEVICE or _exists(path)

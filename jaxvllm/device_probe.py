"""What accelerator this machine has, found without starting a JAX backend or a CUDA context."""

import ctypes
import importlib.util
import os
from dataclasses import dataclass

_NVML_LIBRARY = "libnvidia-ml.so.1"
_CUDA_LIBRARY = "libcuda.so.1"
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclass(frozen=True)
class GpuInfo:
    """The first NVIDIA GPU: its name and its memory in bytes, zero where the driver does not say."""

    name: str
    memory_bytes: int


def has_cuda_plugin() -> bool:
    """Whether JAX in this environment can use an NVIDIA GPU."""
    return any(importlib.util.find_spec(name) is not None for name in _CUDA_PLUGINS)


def has_nvidia_device() -> bool:
    """Whether the driver shows at least one GPU to this process."""
    return any(os.path.exists(f"/dev/nvidia{i}") for i in range(16)) or os.path.exists("/dev/dxg")


def probe_gpu(index: int = 0) -> GpuInfo:
    """Ask the driver's management library, which needs no context, for one GPU's name and memory."""
    try:
        nvml = ctypes.CDLL(_NVML_LIBRARY)
    except OSError:
        return GpuInfo("unknown", 0)
    if nvml.nvmlInit_v2() != 0:
        return GpuInfo("unknown", 0)
    try:
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            return GpuInfo("unknown", 0)
        nvml.nvmlDeviceGetName(handle, name, len(name))
        nvml.nvmlDeviceGetMemoryInfo(handle, memory)
        return GpuInfo(name.value.decode(errors="replace"), int(memory[0]))
    finally:
        nvml.nvmlShutdown()


def driver_free_bytes(ordinal: int) -> int | None:
    """What the driver has left of a GPU on which this process has a CUDA context; None if it cannot be asked.

    Args:
      ordinal: of the device among those that this process sees.
    """
    try:
        cuda = ctypes.CDLL(_CUDA_LIBRARY)
    except OSError:
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if cuda.cuDeviceGet(ctypes.byref(device), ordinal) != 0:
        return None
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) != 0:
        return None
    try:
        if cuda.cuCtxPushCurrent_v2(context) != 0:
            return None
        failed = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
        return None if failed else free.value
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)

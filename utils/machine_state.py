"""The machine under a training process: memory, the GPU's work, room on the disk.  Read when asked, without a sync."""

import functools
import os

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")


def machine_state(disk: str) -> dict[str, float]:
    """Return {metric: number} of what there is here; disk: a folder on the disk to look at."""
    found = {}
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            found["trainer_host_memory_bytes"] = int(file.read().split()[1]) * _PAGE
    room = os.statvfs(disk)
    found["trainer_disk_free_bytes"] = room.f_bavail * room.f_frsize
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["trainer_gpu_memory_allocated_bytes"] = torch.cuda.memory_allocated()
        found["trainer_gpu_memory_reserved_bytes"] = torch.cuda.memory_reserved()
        found["trainer_gpu_memory_peak_bytes"] = torch.cuda.max_memory_allocated()
    return found | _nvml_state()


def _nvml_state() -> dict[str, float]:
    """Return what NVML says of this process's GPU; nothing where there is no driver, and not what it does not know."""
    nvml, handle = _nvml()
    found = {}
    if handle is None:
        return found
    reads = {
        "trainer_gpu_utilization_ratio": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "trainer_gpu_temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "trainer_gpu_power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    }
    for name, read in reads.items():
        try:
            found[name] = read()
        except nvml.NVMLError:  # not supported: a part of a card (MIG) has no utilisation
            continue
    return found


@functools.cache
def _nvml() -> tuple:
    """Return NVML and the handle of this process's GPU, or None for what there is not."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        # NVML counts all GPUs of the machine, PyTorch those it may see: the UUID is the same.
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # no package, no driver, no GPU
        return None, None

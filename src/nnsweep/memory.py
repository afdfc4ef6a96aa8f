"""The memory that a chunk job may fill on the machine that plans."""

import os

GPU_SHARE, CPU_SHARE = 0.8, 0.6


def available(device: str, threads: int) -> float:
    """Bytes of one job.

    Args:
        device: `auto`, `cpu` or `cuda`; a GPU is one job's alone.
        threads: CPU threads of a job; as many jobs as the cores allow share the memory.
    """
    gpu = None if device == "cpu" else _gpu()
    if gpu is not None:
        return GPU_SHARE * gpu
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    jobs = max(1, len(os.sched_getaffinity(0)) // threads)
    return CPU_SHARE * whole / jobs


def _gpu() -> int | None:
    """Bytes of the smallest GPU here, or None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = range(torch.cuda.device_count())
    return min(torch.cuda.get_device_properties(index).total_memory for index in found)

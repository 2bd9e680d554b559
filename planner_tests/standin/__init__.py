"""A stand-in for GPUs: torch's own CUDA code, NCCL and NVML over main memory, on a machine that has none."""

"""The cuda-checkpoint residency driver: a process is moved off its GPU whole, by NVIDIA's own means. A last resort.

Off until ``[residency.cuda-checkpoint] enabled = true``. One process at a time, since ranks that were frozen in
parallel deadlocked. No NCCL, no CUDA IPC, no UVM, no MIG or MPS. Needs driver 570 or newer, x86-64.
"""

from rollmuxd_cuda_checkpoint.residency import CudaCheckpointResidency

__all__ = ["CudaCheckpointResidency"]

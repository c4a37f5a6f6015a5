"""The vLLM residency driver: engines sleep and wake by their own calls (``/sleep``, ``/wake_up``).

Checked against the sources of vLLM 0.33.0. An engine needs ``--enable-sleep-mode`` and ``VLLM_SERVER_DEV_MODE=1``.
"""

from rollmuxd_vllm.residency import VllmResidency

__all__ = ["VllmResidency"]

"""The SGLang residency driver: engines give their GPU memory back, and take it again, by their own calls.

Checked against the sources of SGLang 0.5.23. An engine needs ``--enable-memory-saver``, and
``--enable-weights-cpu-backup`` unless its weights come from elsewhere each time.
"""

from rollmuxd_sglang.residency import SglangResidency

__all__ = ["SglangResidency"]

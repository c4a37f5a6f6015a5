"""RollPacker's rule for the degree of tensor parallelism: by preemptions, one step after the other (arXiv 2509.21009).

Preemptions mean that the KV cache is too small, and a higher degree has more of it per replica. Where the lengths of
the last steps are known, :func:`rollmuxd.rollout.plan.start` is the better rule.
"""

from collections.abc import Sequence
from typing import Final

#: more preemptions than so many times those of the step before: double the degree
MORE: Final = 1.05
#: so many steps without one: halve it
CALM: Final = 4


def next_degree(tp: int, preemptions: Sequence[int], allowed: Sequence[int]) -> int:
    """The degree of the next step.

    ``preemptions``: of the steps since the degree changed last, the newest last. ``allowed``: degrees that the model
    fits on and a node has GPUs for. A degree that is not allowed is never returned, unless it is ``tp`` itself.
    """
    wanted = tp
    if len(preemptions) >= 2 and preemptions[-1] > MORE * preemptions[-2]:
        wanted = 2 * tp
    elif len(preemptions) >= CALM and not any(preemptions[-CALM:]):
        wanted = tp // 2
    return wanted if wanted in allowed else tp

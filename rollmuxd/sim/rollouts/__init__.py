"""One rollout after the other, by itself: which degree, which dispatch, which moves, and what each of them brings.

===================  ===============================================================================================
:mod:`.batches`      lengths of responses, from public records or your own file
:mod:`.run`          one step of one job under one policy, on replicas of :mod:`rollmuxd.rollout.engine`
:mod:`.study`        policies on the same batches, over seeds; what ``rollmuxd sim rollout`` prints
===================  ===============================================================================================
"""

"""What the tables of the RollMux paper need: its baselines, the exact optimum, and its workloads.

The simulator finds them by entry point: :data:`~rollmuxd_evaluation.baselines.POLICIES` in the group
``rollmuxd.sim_policies``, :data:`~rollmuxd_evaluation.workloads.WORKLOADS` in ``rollmuxd.sim_workloads``. A daemon
uses none of it.
"""

"""The simulator: the scheduler's own core in a world of discrete events.

===================  ===============================================================================================
:mod:`.workload`     what a run is given: jobs, pools, how long phases take. ``workloads/`` makes them, by name
:mod:`.policies`     what is compared, by name: the daemon's policies, ``solo``, and those of packages
:mod:`.kernel`       the heap of events and the clock
:mod:`.world`        fidelity ``phase``: each request, grant, load, park and release passes through the scheduler
:mod:`.fluid`        fidelity ``cost``: only arrivals and departures are events; an iteration takes what the plan says
:mod:`.execution`    what a phase does between grant and end; ``executions/`` has other answers, by fidelity
:mod:`.machines`     what is on GPUs and in RAM; :mod:`.inventory` names the nodes, :mod:`.meter` charges for them
:mod:`.outcome`      what one run came to; :mod:`.compare` makes many runs, :mod:`.tables` and ``report/`` show them
:mod:`.perfetto`     from facts, a daemon's too, to a trace of slots and orders
:mod:`.estimate`     whether sharing pays, from :mod:`.training_logs` or from what a daemon :mod:`.observed`
===================  ===============================================================================================

The paper's baselines and workloads are in ``plugins/evaluation``, found by entry point. Faults, and the checkers that
hold a run to all promises, are test code: ``tests/simkit``. A run itself checks at each
grant and load that no other job is on the GPUs. At each placement it checks that hosts have the RAM.

A run has one of two **accountings**. In ``paper`` a job ends when its trace says, however slow it was. In ``work`` it
ends when it has done its iterations.

Time is integer milliseconds from 0. There is one heap and one seeded source of randomness per purpose, and no clock:
the same seed gives the same bytes of facts. Nothing in the core knows that it is simulated.
"""

from rollmuxd.core.errors import BrokenInvariant as Violation

__all__ = ["Violation"]

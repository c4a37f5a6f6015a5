"""The simulator: the scheduler's own core in a world of discrete events.

How it works, in one page. A :class:`~rollmuxd.sim.workload.Workload` says which jobs come when, what each of their
phases takes, and what nodes there are to have (bought on demand, or a fixed number). A
:class:`~rollmuxd.sim.policy_under_test.PolicyUnderTest` is a policy with what it needs around it: a daemon's own, or
one to compare it with. A run gives one of them one workload in one of two **fidelities**:

- ``cost`` (:mod:`~rollmuxd.sim.fluid`): only arrivals and departures are events; between them every job's iteration
  takes its group's planned period. Hundreds of jobs in a fraction of a second.
- ``phase`` (:mod:`~rollmuxd.sim.world`): every request, grant, load, park and release of every iteration passes
  through :class:`~rollmuxd.core.scheduler.Scheduler`, as live. The core's invariants are checked now and then, and at
  each grant and load that no other job is on the GPUs.

and in one of two **accountings**: ``paper`` (a job ends when its trace says, however slow it was) and ``work`` (a job
ends when it has done its iterations). What came of it is an :class:`~rollmuxd.sim.outcome.Outcome`. ``compare`` runs
contenders over seeds and pairs them; ``report`` draws.

Time is integer milliseconds from 0. One heap (:mod:`~rollmuxd.sim.kernel`), one seeded source of randomness per
purpose, no clock: the same seed gives the same bytes of facts. Nothing in the core knows that it is simulated.
"""

from rollmuxd.core.errors import BrokenInvariant as Violation

__all__ = ["Violation"]

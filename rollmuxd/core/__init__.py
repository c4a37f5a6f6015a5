"""The scheduler's core, which cannot do IO: inputs and a time in, facts and effects out.

How it works, in one page. Clients, operators and backends bring **inputs**. :class:`~rollmuxd.core.scheduler.Scheduler`
decides on one input at a time. It answers with **facts** (what happened; the journal keeps them) and **effects** (what
backends must do). Only facts change the :class:`~rollmuxd.core.state.State`, through ``apply``: the same code live, in
replay and in the simulator. Refusals are **errors** and change nothing. Those four files (``inputs``, ``facts``,
``effects``, ``errors``) say what the system can do; ``lifecycle`` says in which order.

A job registers and waits. The **policy** (:mod:`rollmuxd.policies`, known by ``policy.Policy`` only) finds it a group
and nodes. They keep every member's promise and fit every host's RAM and every GPU's memory. In its **group** the jobs
take turns: the **schedule** is a cyclic sequence of turns, one for each phase of each job. Each node serves its
projection of the schedule (``order``), and a turn begins when it is first on all its nodes (``steps.dispatch``). What
another job left there is parked first. A GPU is claimed only when a backend has observed that it is clean; until then
it is ``dirty_by`` that job. A slot that ends without its holder's word keeps its GPUs until then.

What is durable is in ``State``. Leases, attachment, progress and deadlines are in ``timers``, and start again with the
daemon. Nothing here reads a clock: ``now`` is an argument, and ``deadline()`` tells when the core
wants to be called again.
"""

"""The scheduler's core, which cannot do IO: inputs and a time in, facts and effects out.

How it works, in one page. Clients, operators and backends bring **inputs**. :class:`~rollmuxd.core.scheduler.Scheduler`
decides on one at a time and answers with **facts** (what happened; the journal keeps them) and **effects** (what must
be done; backends are told). Only facts change the :class:`~rollmuxd.core.state.State`, through ``fold.apply``, which
is the same code live, in replay and in the simulator. Refusals are **errors** and change nothing. Those four files
(``inputs``, ``facts``, ``effects``, ``errors``) say what the system can do; ``lifecycle`` says in which order.

A job registers and waits. The **policy** (``placement``: the paper's Algorithm 1; ``loom``: past it) finds it a group
and nodes that keep every member's promise, every host's RAM and every GPU's memory. In its **group** the jobs take
turns: the **wheel** is a cyclic sequence of visits, one for each phase of each job; each node serves its projection of
the wheel (``rotation``), and a visit begins when it is first on all its nodes (``turns``). What another job left there
is parked first, and a GPU is claimed only when a backend has *seen* it clear: each GPU remembers whose bytes may be on
it (its *stain*) until then. A slot that ends without its holder's word keeps its GPUs until they were seen clear.

What is durable is in ``State``. What is soft (leases, attachment, progress, when to look again) is in ``soft``, and
starts anew with the daemon. Nothing here reads a clock: ``now`` is an argument, and ``deadline()`` tells when the core
wants to be called again.
"""

"""Hooks for frameworks, one module each, nothing of them here. Most have a loop in one process that talks to workers.

``contract`` says what each hook rests on, as data: the installed framework is held against it when a hook is imported.
``loop`` is a framework's loop as a job. The rest are the hooks, each a few methods of its framework and the phase that
each of them is in:

- ``openrlhf``: ``python -m rollmuxd_hooks.openrlhf`` in place of ``python -m openrlhf.cli.train_ppo_ray``
- ``skyrl``: ``python -m rollmuxd_hooks.skyrl``, or the mixin ``Sharing`` for an experiment of one's own
- ``prime_rl``: ``python -m rollmuxd_hooks.prime_rl`` in place of ``python -m prime_rl.trainer.rl.train``, in each rank
- ``areal``, ``roll``, ``slime``, ``nemo_rl``: the same names, imported from here

A new hook has its :class:`~rollmuxd_hook_kit.contract.Contract` in ``contract``, and a module that calls
:func:`~rollmuxd_hook_kit.contract.look_at` first. The module makes a :class:`~rollmuxd_hooks.loop.Loop` and puts
brackets around methods by :func:`~rollmuxd_hook_kit.turns.around`. ``make drift`` writes its facts, and a test drives
its loop.
"""

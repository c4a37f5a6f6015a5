"""What hooks for training frameworks have in common; nothing heavy is imported here.

A hook is made of three parts:

1. A ``contract`` module with ``CONTRACTS``, a tuple of :class:`~rollmuxd_hook_kit.contract.Contract`: the releases that
   were looked at, and the methods, parameters and calls that are needed. It is data, and is compared with the
   framework's source, which is read and not run. ``contract.check`` does that at the start of a run, and tests do it
   with what ``tests/facts-FRAMEWORK.json`` keeps of each release. New releases are compared by ``make drift``, which
   finds every ``plugins/*/rollmuxd_hook*/contract.py``.
2. A :class:`rollmuxd.job` and its :class:`~rollmuxd_hook_kit.turns.Turns`: the one phase that is held is left where
   the next one begins.
3. Where the phases begin and end: a subclass, or methods of a live object, from where ``Turns.go``, ``leave`` and
   ``within`` are called. Where the framework imports the hook before its own trainer: ``late.when_imported``.
"""

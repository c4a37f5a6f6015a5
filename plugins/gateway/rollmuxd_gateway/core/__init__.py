"""The pure core of the gateway: ``Gateway.handle(input, now)`` returns effects; ``deadline()`` says when to ask again.

Read first ``model`` (what is remembered), ``lifecycle`` (what may follow what), ``inputs`` and ``effects``. Then
``splice`` (which request may move, and with which change), ``placing`` (where it goes), ``rollout`` (how far the phase
is), and ``gateway``. ``balancing`` and ``rungs`` plan with numpy, where a job asks for it. No clock, no IO, no
randomness: times are integer milliseconds that come in as ``now``.
"""

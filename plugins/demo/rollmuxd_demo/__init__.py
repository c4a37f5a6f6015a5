"""``rollmuxd demo``: real RL loops share two pools, then run one after the other, and the two are compared.

:mod:`run` starts and ends the processes, :mod:`measure` is the arithmetic, :mod:`live` the view while it runs and
:mod:`show` the report.
"""

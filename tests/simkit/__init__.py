"""What tests of the scheduler share: runs of the simulator under checkers, with faults, in random histories.

- :mod:`~simkit.checked` runs a world under all checkers: what most tests want.
- :mod:`~simkit.checkers` judge every input and every decision by the promises.
- :mod:`~simkit.faulty_world` is a world in which things fail, as often as :mod:`~simkit.faults` says.
- :mod:`~simkit.swarm` draws random histories (``make swarm``), :mod:`~simkit.small` small worlds for the presets.
- :mod:`~simkit.chaos_policy` moves jobs about for no good reason.
"""

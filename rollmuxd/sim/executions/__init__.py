"""Other answers to :mod:`rollmuxd.sim.execution`, one module for each: they need numpy."""

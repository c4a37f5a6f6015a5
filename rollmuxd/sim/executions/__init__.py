"""The answers to :mod:`rollmuxd.sim.execution`: one module for each way to say what a phase does."""

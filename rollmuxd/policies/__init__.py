"""Policies: which jobs share which nodes. The scheduler knows them by :mod:`rollmuxd.core.policy` alone."""

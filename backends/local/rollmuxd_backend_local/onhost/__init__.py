"""What is asked of a machine, by code that runs on it: GPUs, RAM, processes.

Needs Python 3.8 on Linux and its standard library, and nothing of rollmuxd. The backend ``ssh`` sends these modules
over the line (:mod:`rollmuxd_backend_local.payload`) to hosts where nothing is installed. ``local`` imports them.
"""

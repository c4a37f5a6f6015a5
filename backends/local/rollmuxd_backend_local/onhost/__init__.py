"""What is asked of a machine, by code that runs on it: GPUs, RAM, processes.

Needs Python 3.8 on Linux and its standard library, and nothing of rollmuxd: the backend ``ssh`` sends these modules
over the line (:mod:`rollmuxd_backend_local.parcel`) to where nothing is installed. ``local`` imports them.
"""

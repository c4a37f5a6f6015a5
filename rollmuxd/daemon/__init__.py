"""The daemon: the shell around the pure core. Read :mod:`rollmuxd.daemon.app` first, from the top.

What lives here talks to the world: the clock, the disk, backends, sockets. What decides lives in
:mod:`rollmuxd.core`; if something here starts to decide, it is in the wrong place.
"""

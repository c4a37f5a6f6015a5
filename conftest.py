"""For all tests, of all projects: they see nothing of the person who runs them.

That person's settings, keys and daemon are found by the home directory and by variables. Here the home directory is
empty, and the variables are not set.
"""

import asyncio
import atexit
import os
import shutil
import tempfile

from hypothesis import HealthCheck, settings

from rollmuxd.client.discovery import VARIABLES

for name in list(os.environ):
    # Those with two underscores are settings of the daemon.
    if name in VARIABLES or name.startswith("XDG_") or (name.startswith("ROLLMUX_") and "__" in name):
        del os.environ[name]
os.environ["HOME"] = tempfile.mkdtemp(prefix="rollmuxd-home-")
atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

# An example may take as long as it takes: the machine may be busy.
settings.register_profile("any machine", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# looptime asks for "the" event loop before every test, synchronous ones too, and the policy would make one, which
# nobody closes. After this it makes none.
asyncio.set_event_loop(None)

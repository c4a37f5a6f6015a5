"""What plugins raise, and what is raised about them.

PluginError
  NotInstalled      no plugin of that name; says which are there, and how to get it
  NotDone           the plugin says that it did not do it
  ContactLost       it is not known whether it was done
"""


class PluginError(Exception):
    """Something about a plugin."""


class NotInstalled(PluginError):
    """No plugin of that name is installed."""


class NotDone(PluginError):
    """The order was not carried out, for certain: the state is where it was, or partly moved on a living process."""


class ContactLost(PluginError):
    """The order may or may not have been carried out. Never treated as success, never as failure."""

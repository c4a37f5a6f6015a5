"""The HTTP interface: :mod:`~rollmuxd.daemon.http.app` puts it together, ``routes`` has one file per noun.

Handlers translate between the wire and the core, and decide nothing. What every call has in common (decoding, the
caller, errors, request ids, the description at ``/v1/openapi.json``) is in :mod:`~rollmuxd.daemon.http.routing`.
"""

"""The JSON of the HTTP interface, as structs. Shared by daemon and client, importing neither.

Requests refuse unknown fields, so that a typo is answered. Times are seconds, sizes gigabytes
(1 GB = 1000 MB), as people write them.
"""

#: what a client, the command line or the daemon reads; the daemon's settings have a double underscore
VARIABLES = (
    "ROLLMUX_API_KEY",
    "ROLLMUX_API_KEY_FILE",
    "ROLLMUX_CA_FILE",
    "ROLLMUX_CONFIG",
    "ROLLMUX_GIVE_UP_S",
    "ROLLMUX_GPUS",
    "ROLLMUX_HOOK",
    "ROLLMUX_HOSTS",
    "ROLLMUX_JOB",
    "ROLLMUX_LAUNCH",
    "ROLLMUX_LOG",
    "ROLLMUX_REQUIRED",
    "ROLLMUX_RUN_KEY",
    "ROLLMUX_SOCKET",
    "ROLLMUX_URL",
)

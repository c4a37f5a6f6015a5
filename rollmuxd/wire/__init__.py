"""The JSON of the HTTP interface, as structs. Shared by daemon and client, importing neither.

Requests refuse unknown fields, so that a typo is answered. Times are seconds, sizes gigabytes
(1 GB = 1000 MB), as people write them.
"""

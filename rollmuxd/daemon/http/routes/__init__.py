"""One file per noun. A handler translates between the wire and the core; it decides nothing."""

"""``rollmuxd sim`` and ``rollmuxd estimate``."""

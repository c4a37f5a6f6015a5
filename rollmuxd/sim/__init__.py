"""The simulator's room: a discrete-event world round the unchanged scheduler core. It comes with part 2."""

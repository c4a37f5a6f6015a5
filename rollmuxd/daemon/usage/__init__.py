"""What GPUs were used for: accounts of each day, and of a span of time."""

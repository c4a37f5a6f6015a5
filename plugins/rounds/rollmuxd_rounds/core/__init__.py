"""What rounds are made of, without clock and IO: prompts, limits of time, gates, sums."""

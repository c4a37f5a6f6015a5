"""Handlers of inputs: each refuses, or records facts. One file per noun. What an input asks is said at the input."""

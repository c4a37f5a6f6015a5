"""Handlers of inputs: each refuses, or records facts. One file per noun."""

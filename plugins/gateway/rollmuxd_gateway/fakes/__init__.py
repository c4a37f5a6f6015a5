"""Engines without a model: for tests, demos and benchmarks."""

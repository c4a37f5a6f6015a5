"""From a file in host memory into a model: torch, vLLM, SGLang."""

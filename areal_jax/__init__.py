"""Asynchronous reinforcement learning for language models in JAX (after AReaL, arXiv 2505.24298)."""

__version__ = "0.1.0"

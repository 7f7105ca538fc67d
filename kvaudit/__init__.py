"""Audit LLM serving engines for cache-history sensitivity."""

__version__ = "0.1.0"

"""How the prompts of a trace fall into segments, which decides what caches can reuse: strategies that cut and join.

Strategies are applied one after another, each to the segments that the ones before it left. No text is ever changed:
the segments of a message, joined, are the message. `strategies.py` lists them, a file holds each family.
"""

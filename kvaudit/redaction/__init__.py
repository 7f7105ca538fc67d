"""Secrets and personal data in texts: detectors that find them, placeholders that stand for them.

Equal values get equal placeholders, so that segments that recur still recur. Nothing here reads or writes traces'
files, and nothing leaves the machine.
"""

"""Traces: one file a format. A reader turns a file into a Trace or raises TraceError with file and line."""

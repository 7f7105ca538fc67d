"""The recording proxy: a transparent reverse proxy that keeps what a service was asked and what it answered.

`server` forwards bytes, `exchange` gathers what is kept of one request and its answer, `answers` puts streamed answers
together, `secrets` takes out what clients prove with who they are (`credentials` knows where that stands), `recording`
decides what becomes of a gathered exchange, `capture` writes the file.
"""

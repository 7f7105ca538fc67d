"""Two deployments side by side on one trace, without an eye on any cache: before and after an upgrade.

`asking` puts every request to both, twice; `comparing` says what changed beyond what each changes by itself.
"""

"""From observations to a verdict, without files and without models.

compare.py   observations -> equal or not            stats.py     intervals and tests, by scipy and statsmodels
figures.py   comparisons -> figures about answers    costs.py     observations -> TTFT, selections, KL
checks.py    what keeps a finding from standing      verdict.py   findings, gates, the exit code
examples.py  the worst requests                      audit.py     all of it, from a run's tables
frontier.py  conditions that no other beats      deviance.py  which switch explains a loss
limits.py    defaults, shared with cli           exchange.py  a permutation test over blocks
"""

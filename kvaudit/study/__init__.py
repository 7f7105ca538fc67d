"""A study: the same audit over a grid of recompute ratios, switches and policies, in one folder.

grid.py     which cells a study has, and what need not run twice (pure)
folder.py   study.json, and claiming the folder
running.py  the cells, one after the other, with full prefill computed once
results.py  finished cells -> frontier, deviance, what is missing

    study.json        what is studied, on what, with which settings
    cells/NAME/       a run folder for each cell, which `kvaudit report` reads by itself
"""

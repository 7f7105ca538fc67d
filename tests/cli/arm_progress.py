"""What a piped replay says of its arms, apart from all else that it says."""

import re

ARM = re.compile(
    r"arm (?P<number>\d+) of (?P<arms>\d+), (?P<arm>.+): finished, (?P<requests>[\d,]+) requests in \d+\.\d s"
)


def told_of_arms(err):
    """Each finished arm: number, of how many, which."""
    found = (ARM.fullmatch(line) for line in err.splitlines())
    return [(int(one["number"]), int(one["arms"]), one["arm"]) for one in found if one]


def told_else(err):
    """Everything but the lines about finished arms."""
    return "".join(line for line in err.splitlines(keepends=True) if not ARM.fullmatch(line.rstrip("\n")))

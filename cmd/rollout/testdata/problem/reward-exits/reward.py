import sys


def exact_match(samples):
    sys.exit("no credit left")

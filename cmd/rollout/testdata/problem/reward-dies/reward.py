import os


def exact_match(samples):
    os.abort()

"""Prints, and forgets to return."""


def exact_match(samples):
    print({"not": "the answer"})

def exact_match(samples):
    return [1.0]

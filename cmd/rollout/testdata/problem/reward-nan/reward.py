def exact_match(samples):
    return [float("nan") for s in samples]

def exact_mach(samples):
    return [1.0 for s in samples]

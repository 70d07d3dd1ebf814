def score(sample):
    return float(int(sample.completion) == int(sample.row["answer"]))


def exact_match(samples):
    return [score(s) for s in samples]

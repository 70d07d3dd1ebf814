def exact_match(samples):
    return [float(sample.completion == sample.row["answer"]) for sample in samples]

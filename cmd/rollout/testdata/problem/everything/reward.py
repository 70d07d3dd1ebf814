def exact_match(samples):
    return [sample.row["anwser"] for sample in samples]

def exact_match(samples):
    return [{"token_rewards": [0.5] * 9} for s in samples]

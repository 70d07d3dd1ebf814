"""The reward of the run: it is called with a list of samples and returns one item per sample.

A sample has ``prompt`` and ``completion`` (text), ``row`` (the row of the dataset), and
``token_ids``. An item is a number, or a mapping with ``reward``, which is trained on, and further
numbers, which become metrics. An exception or a timeout never becomes a reward of 0: the samples
are retried, then excluded and counted.
"""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def correct_number(samples):
    """1 if the last number of the completion is the answer, and 0.1 for any number at all.

    If all completions of a prompt get the same reward there is nothing to learn from; the small
    part gives a model that rarely finds the answer something to begin with.
    """
    return [score(sample.completion, sample.row["answer"]) for sample in samples]


def score(completion, answer):
    numbers = [float(text.replace(",", "")) for text in NUMBER.findall(completion)]
    correct = bool(numbers) and numbers[-1] == float(answer)
    return {"reward": 1.0 if correct else 0.1 * bool(numbers), "accuracy": float(correct)}

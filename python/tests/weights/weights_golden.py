"""The vectors of ``schemas/golden/weights_digest.json``. Run as a script to regenerate them from
the reference.

python python/tests/weights/weights_golden.py > schemas/golden/weights_digest.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[3] / "schemas/golden/weights_digest.json"

CASES: dict[str, list[tuple[str, str, list[int]]]] = {
    "no tensor": [],
    "one row": [("model.norm.weight", "float32", [4])],
    "a scalar": [("scale", "float32", [])],
    "no element": [("empty", "float32", [0, 8])],
    "exactly one block of rows": [("w", "bfloat16", [256, 3])],
    "one row more than a block": [("w", "bfloat16", [257, 3])],
    "three dimensions": [("experts", "float32", [300, 2, 5])],
    "a vector of more than one block": [("bias", "uint8", [65_537])],
    "same bytes, another shape": [("w", "float32", [2, 6])],
    "same bytes, shape turned": [("w", "float32", [6, 2])],
    "same bytes, another dtype": [("w", "bfloat16", [4, 6])],
    "order by bytes of the name": [
        ("b", "float32", [2]),
        ("B", "float32", [2]),
        ("a.b", "float32", [2]),
        ("ab", "float32", [2]),
        ("é", "float32", [2]),
        ("z", "float32", [2]),
    ],
    "names that run together": [("a", "float32", [1]), ("afloat32", "float32", [1])],
}


def vectors() -> dict[str, Any]:
    """The whole golden file as JSON values."""
    from .weights_reference import SIZES, Entry, leaves, node, pattern, root

    cases: list[dict[str, Any]] = []
    for title, shapes in CASES.items():
        entries = []
        for name, dtype, shape in shapes:
            count = SIZES[dtype]
            for size in shape:
                count *= size
            entries.append(Entry(name, dtype, shape, pattern(count)))
        tensors = [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": entry.shape,
                "leaves": leaves(entry),
                "digest": "blake3-" + node(entry),
            }
            for entry in entries
        ]
        cases.append({"case": title, "tensors": tensors, "root": "blake3-" + root(entries)})
    return {
        "what": "Weights digests. The bytes of every tensor are a pattern: byte i is (31 * i + 7) mod 251.",
        "scheme": "rollout.weights.v1",
        "cases": cases,
    }


if __name__ == "__main__":
    print(json.dumps(vectors(), indent=1, ensure_ascii=False))

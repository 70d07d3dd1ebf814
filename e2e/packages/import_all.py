"""Imports every module of an installed distribution: import_all.py NAME."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

failed: dict[str, str] = {}
imported = 0
for file in importlib.metadata.files(sys.argv[1]) or ():
    if file.suffix != ".py" or file.name == "__main__.py":
        continue
    name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    try:
        importlib.import_module(name)
        imported += 1
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
assert imported > 50, imported
assert not failed, failed
print(imported, "torch" in sys.modules)

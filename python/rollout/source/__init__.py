"""Reads data sets: files (JSON Lines, Parquet, CSV, Arrow), globs, folders, data sets of the
Hugging Face Hub, and mixtures of them.

``prepare`` writes the rows of a plan to one JSON Lines file, which the rest of the system reads;
``rollout infer batch`` reads rows through ``read``. Libraries are imported when a source needs
them: ``pyarrow`` for Parquet and Arrow, ``datasets`` and ``huggingface_hub`` for the hub.
"""

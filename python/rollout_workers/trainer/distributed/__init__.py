"""The ranks of a trainer: one, or several with FSDP2."""

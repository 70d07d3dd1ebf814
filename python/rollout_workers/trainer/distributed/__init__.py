"""Several ranks that train one model: FSDP2, and rank 0 that leads the others."""

"""The reward worker: serves a trained reward model to the inference workers of its run."""

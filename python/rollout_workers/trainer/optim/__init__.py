"""AdamW over flat parameters, and the learning-rate schedule."""

"""The learner worker: reads batches, makes steps with the trainer, publishes weights, saves its
state."""

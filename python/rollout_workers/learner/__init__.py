"""The learner worker: reads batches, trains steps, publishes weights, and saves its state."""

"""What happens around the engine: environments, prompts, rewards, and the episodes that tie them together. Imports no torch."""

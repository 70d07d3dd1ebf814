"""Models in training: the policy, the reward model, the critic, the reference, and the teacher,
with what speeds them up."""

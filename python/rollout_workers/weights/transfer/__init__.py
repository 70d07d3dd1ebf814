"""The transfer of weights from the learner to workers without access to its folder. Works on the
bytes of files, and imports no torch."""

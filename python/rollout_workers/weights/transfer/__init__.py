"""How weights get from the learner to workers that can't open its folder. Imports no torch: what
travels are bytes of files."""

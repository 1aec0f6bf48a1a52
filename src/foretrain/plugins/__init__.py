"""A framework's side of the core: hooks turn gradients into tasks, and updates wait for their sums."""

"""The doctor: facts about this machine, and findings about them."""

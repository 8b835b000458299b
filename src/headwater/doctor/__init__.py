"""headwater doctor: facts about the environment, and findings with remedies."""

"""From a user's files to examples: bytes → lines → rows → examples, with every loss counted and placed."""

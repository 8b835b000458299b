"""The page's server: loopback only unless a token guards it, and nothing is served that was not asked for by name."""

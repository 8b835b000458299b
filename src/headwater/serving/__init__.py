"""HTTP server of the web page: on loopback only, unless a token is required; files are served by exact name."""

"""Request handlers of the server, one module for each view of the page."""

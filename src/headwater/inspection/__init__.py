"""Looking at models and machines: plain data first, pictures and words made from it."""

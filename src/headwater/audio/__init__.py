"""Audio: recordings to samples, samples to log-mel spectrograms, and the embedding that reads them."""

"""AudioLM: sound from sound tokens. Voices (token files), the loops of the three stages, clips to tokens and back."""

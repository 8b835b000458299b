"""Text to token ids and back: one Tokenizer over the `tokenizers` library, its loaders, and chat templates."""

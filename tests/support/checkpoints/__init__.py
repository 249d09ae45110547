"""Models, tokenizers, adapters and weight files that tests make."""

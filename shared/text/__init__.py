"""Text: tokenizers, grammars and log probabilities, as gateway, worker and commands share them."""

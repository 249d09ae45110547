"""Turn text into token ids and back: tokenizer, chat template, stop strings, grammars, tools, log-probabilities."""

"""What a model is on disk and by name: the Hub, files of weights and tokenizers, adapters, models.yaml."""

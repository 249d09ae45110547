"""The OpenAI API: one module per endpoint, bodies, validation, events, errors."""

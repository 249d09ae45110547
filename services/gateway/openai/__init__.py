"""Serve the OpenAI API: bodies, from body to request, one module for each endpoint, events, the OpenAPI document."""

"""Anthropic's Messages API over chat: bodies, one for each endpoint, answers whole or as events, the routes."""

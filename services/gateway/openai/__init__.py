"""Serve the OpenAI API: one module for each endpoint, over what they share.

`bodies` reads a body and makes a request of it; `output` makes the grammar that binds its tokens; `answers` writes
events or one body; `pooled` writes vectors and scores; `document` describes the answers.

Endpoints import these, and of each other `chat`, `completions` and `requests`. None of the shared modules imports an
endpoint.
"""

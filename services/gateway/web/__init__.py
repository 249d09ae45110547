"""Serve the pages of the API port: the chat at `/` and the API reference at `/docs`.

`routes.py` names the files beside it. They are plain HTML, CSS and JavaScript without a build step, load nothing from
another server, and put text of models and users into the page as text only.
"""

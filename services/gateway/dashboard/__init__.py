"""Show the live page of the ops port: `feed.py` reads Redis once a second for all viewers, `routes.py` serves files and
events. The files beside them are the page itself.
"""

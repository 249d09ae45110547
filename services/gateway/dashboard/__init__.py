"""The live page of the ops port: `feed.py` reads Redis once a second for all viewers, `pages.py` serves what a browser
needs. The page itself is plain HTML, CSS and JavaScript; the only foreign part is vendor/uPlot 1.6.32 (MIT).
"""

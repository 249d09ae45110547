"""A replica of several processes: `state` is a rank and its connections, `launch` starts the ranks, `leader` forwards
steps to them. Above this package, `broadcast` sends the sampled tokens and `rank_server` is the other ranks' server.
"""

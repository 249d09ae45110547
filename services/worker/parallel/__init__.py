"""A replica of several processes: `state` is a rank and its connections, `launch` starts the ranks, `leader` forwards
steps to them, `broadcast` sends the sampled tokens. The other ranks' server is `rank_server`, above this package.
"""

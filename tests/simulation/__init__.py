"""The services on one virtual clock. `python -m tests.simulation` plays a run for each seed; a seed is always one run.

`clock.py` has the loop: a process is a queue of callbacks, the seed draws which process runs next, and time passes when
none can. `network.py` delays, cuts and breaks connections. `redis_server.py` is fakeredis with the real scripts of
shared/lua behind redis-py's own client; `test_fake_redis.py` compares it with real servers. `worker.py` speaks the step
protocol and computes tokens from prompt, seed and position. `world.py` starts the schedulers, workers, gateways and
clients of a seed and draws its faults. `checker.py` says what must be true, after each command of Redis, at each client
and at the end. `mutants.py` plants bugs that the checker has to find. `run.py` plays seeds.
"""

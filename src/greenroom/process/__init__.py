"""Engine processes: started through a keeper, watched, logged, and ended as whole trees.

Owns every child process of the gateway, the ports they listen on, and the state directory that names them. Never knows
what an engine is for, and never speaks HTTP. Read `keeper.py` first, then `spawn.py`.
"""

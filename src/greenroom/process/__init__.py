"""Engine processes: started through a keeper, watched, logged, and ended as whole trees.

Owns every child process of the gateway, their ports, and the state directory. Does not know what an engine is for, and
does not use HTTP. Read `keeper.py` first, then `spawn.py`.
"""

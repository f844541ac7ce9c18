"""What the benchmarks share: processes, the gateway, load beside nginx, models of random weights, and the closing line.

`load.py`, `mock_engine.py` and `gpu_worker.py` are programs of their own. They are started by path and import nothing
from here, so that any interpreter can run them.
"""

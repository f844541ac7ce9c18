"""A worker process that hosts many torch models: asleep in host memory, awake on a device, each behind a socket.

Imported as `torch_host` by the worker program, which may run under another Python than the gateway: only relative
imports, the standard library and the engine's packages. Nothing of the gateway is imported here.
"""

"""What the programs of the history test share: one host, two GPUs."""

HOST = "box"
GPU_MIB = 10_000
DEVICES = {"gpu0": GPU_MIB, "gpu1": GPU_MIB}

"""Eight fake CPU devices for the mesh tests; set before jax is imported."""

import os
import signal

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# a shell starts what it puts in the background with SIGINT ignored, and the runs that tests interrupt would inherit it
signal.signal(signal.SIGINT, signal.default_int_handler)

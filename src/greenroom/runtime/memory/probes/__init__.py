"""Where memory figures come from: NVML, a file, a made-up machine."""

"""The program of the engine `comfyui`: starts the operator's ComfyUI and serves OpenAI's image API for it."""

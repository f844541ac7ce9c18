"""The program of the engine `comfyui`: starts the operator's ComfyUI and speaks OpenAI's image API for it."""

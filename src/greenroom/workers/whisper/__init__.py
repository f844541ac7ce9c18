"""The worker program of the engine `whisper`: one faster-whisper model behind OpenAI's audio routes.

main.py         the process: options, loading, the socket
api.py          routes, what a request asks for, and json, text, srt, vtt, verbose_json and events
transcribing.py one request after another on the model, in windows, in threads
sound.py        files of any format as samples, in bounded memory
"""

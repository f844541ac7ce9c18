"""The APIs that clients use beside OpenAI's chat. Pure functions: nothing here does I/O, waits or reads a clock.

`neutral.py` is the form between all of them, `chat.py` its OpenAI side; each dialect has files of its own, and
`translation.py` joins the two sides for one request.
"""
